"""The store takes what is genuine, timely and within quota; nothing that a stranger offers moves anything else."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.ids import Key, PeerId
from peerd.core.limits import CLOCK_TOLERANCE_S, RECORD_TTL_S
from peerd.core.record import Record, Verifier
from peerd.dht.node.routing_table import place
from peerd.dht.node.store import Store, StoreLimits, Verdict, answer_bytes
from peerd.wire.budget.book import Book, Bounds, Resource, User
from tests.worlds.simulation.heapsim import StandInSigner, stand_in_verify

OWN = PeerId.from_public_key(b"o" * 32)
WALL = 1_800_000_000.0
ALICE, BOB = StandInSigner(b"a" * 32), StandInSigner(b"b" * 32)
KEY = Key.of("key")


def record(
    signer: StandInSigner = ALICE,
    key: Key = KEY,
    suffix: bytes = b"",
    value: bytes = b"v",
    version: int = 1,
    lives_s: float = 60.0,
    tombstone: bool = False,
) -> Record:
    expires_ms = round((WALL + lives_s) * 1000)
    return Record(key, signer.peer_id, suffix, value, version, expires_ms, tombstone).signed(signer)


def store(**limits: int) -> Store:
    return Store(OWN, Verifier(stand_in_verify), StoreLimits(**limits))


def test_a_genuine_record_is_stored_and_given_back_until_it_expires() -> None:
    kept = store()
    assert kept.offer(WALL, record()) == (Verdict.STORED, 1)
    assert kept.offer(WALL, record()) == (Verdict.STORED, 1)  # again: nothing changes
    assert kept.get(WALL + 59, KEY) == [record()]
    assert kept.get(WALL + 60, KEY) == []
    assert len(kept) == 1
    assert kept.purge(WALL + 60 + CLOCK_TOLERANCE_S) == 1
    assert len(kept) == kept.held_bytes == 0


def test_records_of_one_key_come_sorted_by_sub_key() -> None:
    kept = store()
    for one in (record(BOB), record(ALICE, suffix=b"z"), record(ALICE, suffix=b"a")):
        assert kept.offer(WALL, one)[0] is Verdict.STORED
    assert [r.sub_key for r in kept.get(WALL, KEY)] == sorted(r.sub_key for r in kept.get(WALL, KEY))
    assert len(kept.get(WALL, KEY)) == 3


@pytest.mark.parametrize(
    "forged",
    [
        replace(record(), value=b"other"),
        replace(record(), publisher=BOB.peer_id),
        replace(record(), key=Key.of("another")),
        replace(record(), version=9),
        replace(record(), expires_ms=round((WALL + 3000) * 1000)),
        replace(record(), signature=bytes(64)),
        replace(record(), signature=b""),
    ],
)
def test_a_forged_record_is_refused_and_changes_nothing(forged: Record) -> None:
    kept = store()
    kept.offer(WALL, record(BOB))
    assert kept.offer(WALL, forged)[0] is Verdict.FORGED
    assert kept.get(WALL, KEY) == [record(BOB)]
    assert len(kept) == 1
    kept.check()


def test_nobody_can_overwrite_anothers_sub_key() -> None:
    """Bob's record may carry any suffix and version: it lives beside Alice's, never in its place."""
    kept = store()
    kept.offer(WALL, record(ALICE))
    kept.offer(WALL, record(BOB, version=99, suffix=ALICE.peer_id.raw))
    assert record(ALICE) in kept.get(WALL, KEY)


def test_a_replayed_older_version_is_stale_and_says_what_is_held() -> None:
    kept = store()
    kept.offer(WALL, record(version=5))
    assert kept.offer(WALL, record(version=4)) == (Verdict.STALE, 5)
    assert kept.offer(WALL, record(version=6)) == (Verdict.STORED, 6)


def test_a_tombstone_keeps_what_it_withdrew_from_coming_back() -> None:
    kept = store()
    old, gone = record(version=1), record(version=2, value=b"", tombstone=True)
    kept.offer(WALL, old)
    assert kept.offer(WALL, gone)[0] is Verdict.STORED
    assert kept.offer(WALL, old) == (Verdict.STALE, 2)
    assert kept.get(WALL, KEY) == [gone]
    kept.purge(WALL + 59)
    assert kept.offer(WALL + 59, old)[0] is Verdict.STALE


def test_expired_and_far_future_records_are_untimely() -> None:
    kept = store()
    assert kept.offer(WALL, record(lives_s=-CLOCK_TOLERANCE_S - 1))[0] is Verdict.UNTIMELY
    assert kept.offer(WALL, record(lives_s=RECORD_TTL_S + CLOCK_TOLERANCE_S + 1))[0] is Verdict.UNTIMELY
    assert kept.offer(WALL, record(lives_s=RECORD_TTL_S))[0] is Verdict.STORED


def test_one_publisher_cannot_fill_a_key_nor_the_store() -> None:
    kept = store(suffixes_per_key=3, records_per_publisher=5)
    verdicts = [kept.offer(WALL, record(suffix=bytes([n])))[0] for n in range(5)]
    assert verdicts.count(Verdict.OVER_QUOTA) == 2
    others = [kept.offer(WALL, record(key=Key.of(f"k{n}")))[0] for n in range(5)]
    assert others.count(Verdict.STORED) == 2
    assert kept.offer(WALL, record(BOB))[0] is Verdict.STORED
    kept.check()


def test_bytes_count_as_records_do() -> None:
    kept = store(bytes_per_publisher=2000)
    assert kept.offer(WALL, record(value=b"v" * 1500))[0] is Verdict.STORED
    assert kept.offer(WALL, record(suffix=b"2", value=b"v" * 1500))[0] is Verdict.OVER_QUOTA
    assert kept.offer(WALL, record(version=2, value=b"v" * 1700))[0] is Verdict.STORED  # replaces its own
    assert kept.offer(WALL, record(version=3, value=b"v" * 1800))[0] is Verdict.OVER_QUOTA
    assert kept.get(WALL, KEY)[0].version == 2
    kept.check()


def test_a_full_store_gives_up_the_farthest_key_for_a_nearer_one_only() -> None:
    kept = store(records=3)
    keys = sorted((Key.of(str(n)) for n in range(6)), key=lambda key: place(key) ^ place(OWN.key))
    for key in keys[2:5]:
        assert kept.offer(WALL, record(key=key))[0] is Verdict.STORED
    assert kept.offer(WALL, record(key=keys[5]))[0] is Verdict.FULL
    assert kept.offer(WALL, record(key=keys[0]))[0] is Verdict.STORED
    assert set(kept.keys()) == {keys[0], keys[2], keys[3]}
    kept.check()


def test_expired_records_make_room_before_living_ones_do() -> None:
    kept = store(records=2)
    kept.offer(WALL, record(key=Key.of("short"), lives_s=1.0))
    kept.offer(WALL, record(key=Key.of("long")))
    later = WALL + 1 + CLOCK_TOLERANCE_S
    assert kept.offer(later, record(BOB, key=Key.of("new")))[0] is Verdict.STORED
    assert set(kept.keys()) == {Key.of("long"), Key.of("new")}


def test_a_publisher_that_renews_all_the_time_does_not_make_the_store_grow() -> None:
    kept = store()
    for version in range(1, 2000):
        kept.offer(WALL, record(version=version, lives_s=60 + version / 1000))
    assert len(kept) == 1
    assert len(kept._expiries) < 200


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1))
def test_any_flood_keeps_counts_and_quotas_and_the_winning_versions(seed: int) -> None:
    rng = random.Random(seed)
    kept = store(
        records=12, bytes=6000, records_per_key=6, bytes_per_key=3000, records_per_publisher=8, suffixes_per_key=2
    )
    signers = [StandInSigner(bytes([n]) * 32) for n in range(4)]
    wall = WALL
    for _ in range(120):
        wall += rng.choice([0.0, 0.0, 1.0, 20.0])
        tombstone = rng.random() < 0.2
        offered = Record(
            Key.of(str(rng.randrange(4))),
            rng.choice(signers).peer_id,
            bytes([rng.randrange(3)]),
            b"" if tombstone else b"v" * rng.randrange(400),
            rng.randrange(5),
            round((wall + rng.uniform(-10, 200)) * 1000),
            tombstone,
        )
        signer = next(s for s in signers if s.peer_id == offered.publisher)
        offered = offered.signed(signer) if rng.random() < 0.9 else replace(offered, signature=bytes(64))
        before = {r.sub_key: r for r in kept.get(wall, offered.key)}
        verdict, version = kept.offer(wall, offered)
        after = {r.sub_key: r for r in kept.get(wall, offered.key)}
        if verdict is Verdict.STORED:
            assert version == offered.version
            beaten = before.get(offered.sub_key)
            assert beaten is None or offered == beaten or offered.beats(beaten)
        elif verdict is not Verdict.FULL:  # on the way to FULL nothing nearer may be lost, but farther keys may
            assert after == before
        kept.check()


def signer(number: int) -> StandInSigner:
    return StandInSigner(number.to_bytes(32, "big"))


def sender(one: StandInSigner, place: str, region: str = "") -> User:
    return User(one.peer_id.text, place, region or f"around {place}")


def test_one_publisher_has_a_bounded_part_of_a_key() -> None:
    kept = store(bytes_per_key_and_publisher=2000)
    assert kept.offer(WALL, record(suffix=b"1", value=b"v" * 1500))[0] is Verdict.STORED
    assert kept.offer(WALL, record(suffix=b"2", value=b"v" * 100))[0] is Verdict.OVER_QUOTA
    assert kept.offer(WALL, record(BOB, value=b"v" * 1500))[0] is Verdict.STORED
    kept.check()


def test_a_full_key_takes_what_comes_from_elsewhere_and_drops_what_one_place_has_most_of() -> None:
    kept = store(records_per_key=10)
    for number in range(10):
        assert kept.offer(WALL, record(signer(number)), sender(signer(number), "a"))[0] is Verdict.STORED
    assert kept.offer(WALL, record(signer(10)), sender(signer(10), "a"))[0] is Verdict.OVER_QUOTA
    for number in range(11, 14):
        assert kept.offer(WALL, record(signer(number)), sender(signer(number), f"b{number}"))[0] is Verdict.STORED
    publishers = {found.publisher for found in kept.get(WALL, KEY)}
    assert {signer(number).peer_id for number in range(11, 14)} <= publishers
    kept.check()


def test_records_of_others_count_where_they_were_brought_from_until_their_publisher_comes() -> None:
    kept = store(records_per_key=4)
    for number in range(4):  # one peer brings them all
        assert kept.offer(WALL, record(signer(number)), sender(BOB, "a"))[0] is Verdict.STORED
    assert kept.offer(WALL, record(signer(0)), sender(signer(0), "honest"))[0] is Verdict.STORED
    for number in range(4, 6):
        assert kept.offer(WALL, record(signer(number)), sender(signer(number), f"b{number}"))[0] is Verdict.STORED
    assert record(signer(0)) in kept.get(WALL, KEY)
    kept.check()


def test_members_records_give_way_to_no_strangers() -> None:
    book = Book()
    members = {signer(number).peer_id.text for number in range(6)}
    book.members_by(members.__contains__)
    kept = Store(OWN, Verifier(stand_in_verify), StoreLimits(records_per_key=4), book)
    for number in range(3):
        assert kept.offer(WALL, record(signer(number)), sender(signer(number), "home"))[0] is Verdict.STORED
    for number in range(10, 20):
        kept.offer(WALL, record(signer(number)), sender(signer(number), f"b{number}"))
    assert kept.offer(WALL, record(signer(4)), sender(signer(4), "home"))[0] is Verdict.STORED
    publishers = {found.publisher.text for found in kept.get(WALL, KEY)}
    assert publishers == {signer(number).peer_id.text for number in (0, 1, 2, 4)}
    kept.check()


def test_a_part_of_a_key_has_small_records_of_one_place_before_large_ones_of_many() -> None:
    large = [(record(signer(n), value=bytes(15_000)), sender(signer(n), f"a{n}")) for n in range(12)]
    small = [(record(signer(n), value=bytes(500)), sender(signer(n), "home")) for n in range(20, 40)]
    parts = []
    for order in ([*large, *small], [*small, *large[::-1]]):
        kept = store()
        for one, user in order:
            assert kept.offer(WALL, one, user)[0] is Verdict.STORED
        parts.append(kept.get(WALL, KEY, 64 << 10))
    assert parts[0] == parts[1]
    assert {one.sub_key for one, _ in small} < {one.sub_key for one in parts[0]}
    assert 48 << 10 < sum(map(answer_bytes, parts[0])) <= 64 << 10
    assert kept.get(WALL, KEY, 256 << 10) == kept.get(WALL, KEY)  # what fits whole comes as always


def test_a_part_of_a_key_has_everybodys_before_the_many_of_one_region_place_or_publisher() -> None:
    kept = store()
    for number in range(60):  # a region with many places, a place with many publishers, a publisher with many records
        one = signer(number)
        kept.offer(WALL, record(one), sender(one, f"a{number}", "a"))
    for number in range(60, 120):
        kept.offer(WALL, record(signer(number)), sender(signer(number), "b1", "b"))
    for number in range(60):
        kept.offer(WALL, record(signer(120), suffix=bytes([number])), sender(signer(120), "c1", "c"))
    alone = [(121, "a", "d"), (122, "b2", "b"), (123, "c1", "c")]
    for number, where, region in alone:
        kept.offer(WALL, record(signer(number), value=bytes(100)), sender(signer(number), where, region))
    part = kept.get(WALL, KEY, 4_000)
    assert {signer(number).peer_id for number, _, _ in alone} < {one.publisher for one in part}
    assert 3_700 < sum(map(answer_bytes, part)) <= 4_000


def test_strangers_in_whatever_many_regions_get_half_of_a_part_beside_members() -> None:
    book, members = Book(), {signer(number).peer_id.text for number in range(10)}
    book.members_by(members.__contains__)
    kept = Store(OWN, Verifier(stand_in_verify), None, book)
    for number in range(100):
        kept.offer(WALL, record(signer(number)), sender(signer(number), "home" if number < 10 else f"b{number}"))
    part = kept.get(WALL, KEY, 20 * answer_bytes(record()))
    assert len(part) == 20
    assert members < {one.publisher.text for one in part}


def test_one_place_has_a_quarter_of_the_whole_store() -> None:
    bounds = Bounds(total=40_000, peer=40_000, place=10_000, region=20_000)
    kept = Store(OWN, Verifier(stand_in_verify), StoreLimits(bytes=40_000), Book({Resource.DIRECTORY: bounds}))
    for number in range(50):
        key = Key.of(f"key {number}")
        kept.offer(WALL, record(signer(number), key=key, value=bytes(1000)), sender(signer(number), "a"))
    assert 8_000 < kept.held_bytes <= 10_000
    assert kept.offer(WALL, record(BOB, value=bytes(1000)), sender(BOB, "b"))[0] is Verdict.STORED
    kept.check()


@pytest.mark.slow
@given(st.data())
def test_whatever_is_offered_from_wherever_counts_and_quotas_hold(data: st.DataObject) -> None:
    bounds = Bounds(total=20_000, peer=6_000, place=8_000, region=12_000)
    limits = StoreLimits(bytes=20_000, bytes_per_key=5_000, records_per_key=6, bytes_per_key_and_publisher=2_500)
    book = Book({Resource.DIRECTORY: bounds})
    book.members_by(lambda peer: peer == signer(0).peer_id.text)
    kept = Store(OWN, Verifier(stand_in_verify), limits, book)
    small = st.integers(0, 4)
    for version in range(1, 25):
        who, place_, bringer, size = data.draw(st.tuples(small, small, small, st.sampled_from([0, 300, 1200])))
        one = record(signer(who), key=Key.of(str(data.draw(st.integers(0, 2)))), value=bytes(size), version=version)
        at = User(signer(bringer).peer_id.text, f"p{place_}", f"r{place_ % 2}")
        verdict, _ = kept.offer(WALL, one, at)
        assert (one in kept.get(WALL, one.key)) is (verdict is Verdict.STORED)
        kept.check()
        book.check()
