"""Copies of what others hold: made when many ask, served to those that allow it, bounded whatever strangers do."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.core.ids import Key, PeerId
from peerd.core.limits import DHT_BYTES_PER_PUBLISHER
from peerd.core.record import Record
from peerd.dht.node import messages as q
from peerd.dht.node.hot_keys import HotKeys, lifetime_s
from peerd.dht.node.store import Verdict
from tests.dht.node.test_node import KEY, contact, node, of_kind, record, serve, signer
from tests.kit.amount import examples
from tests.worlds.simulation.heapsim import EPOCH_S, StandInSigner

PEERS = [StandInSigner(bytes([n]) * 32).peer_id for n in range(1, 20)]


def ask_often(hot: HotKeys, now: float, key: Key = KEY, place: str = "here", useful_s: float = 60.0) -> bool:
    return [hot.asked(now, key, peer, place, useful_s) for peer in PEERS[:4]][-1]


def test_a_key_is_looked_up_once_four_peers_have_asked_for_it_while_a_copy_would_be_of_use() -> None:
    hot = HotKeys()
    assert [hot.asked(1.0, KEY, PEERS[0], "here", 60.0) for _ in range(9)] == [False] * 9
    assert [hot.asked(2.0, KEY, peer, "here", 60.0) for peer in PEERS[1:5]] == [False, False, True, False]
    assert not any(hot.asked(20.0 * n, Key.of("slow"), peer, "here", 50.0) for n, peer in enumerate(PEERS))
    assert not any(hot.asked(1.0, Key.of("far"), peer, "here", 0.5) for peer in PEERS)


def test_a_copy_is_served_while_it_is_young_enough_for_the_reader_and_no_record_beyond_its_life() -> None:
    hot, wall = HotKeys(), EPOCH_S
    assert ask_often(hot, 1.0)
    dying = record(suffix=b"dying", expires_ms=round((EPOCH_S + 30) * 1000))
    hot.keep(3.0, KEY, [record(), dying], bits_beyond=3)
    assert hot.get(4.0, wall, KEY, 3) == [record(), dying]
    assert hot.get(4.1, wall, KEY, 3) == []  # its age counts from the question, not from the answer
    assert hot.get(40.0, wall + 31, KEY, 60) == [record()]
    assert hot.get(1.0 + lifetime_s(3), wall, KEY, 3600) == []
    assert hot.get(4.0, wall, KEY, 60, most_bytes=1) == []


def test_copies_live_half_as_long_for_each_bit_of_distance() -> None:
    assert [lifetime_s(0) / lifetime_s(bits) for bits in (1, 2, 5)] == [2, 4, 32]
    assert lifetime_s(256) < 1


def test_one_place_leads_to_a_few_lookups_a_minute_and_keeps_no_other_from_any() -> None:
    hot = HotKeys()
    made = 0
    for number in range(100):
        key = Key.of(f"invented {number}")
        if ask_often(hot, 1.0, key, "crowd"):
            made += 1
            hot.keep(1.0, key, [], 0)
    assert made == 16
    assert ask_often(hot, 1.0, KEY, "elsewhere")
    hot.keep(1.0, KEY, [], 0)
    assert ask_often(hot, 62.0, Key.of("later"), "crowd")


def test_a_publisher_with_more_than_its_share_gets_no_further_key_copied() -> None:
    hot = HotKeys()
    big = [record(suffix=b"%d" % n, value=bytes(16 << 10)) for n in range(DHT_BYTES_PER_PUBLISHER // (17 << 10))]
    hot.keep(1.0, KEY, big, 0)
    more = [record(key=Key.of("more"), suffix=b"%d" % n, value=bytes(16 << 10)) for n in range(10)]
    hot.keep(1.0, Key.of("more"), more, 0)
    hot.check()
    assert hot.get(2.0, EPOCH_S, KEY, 60) == big
    assert hot.get(2.0, EPOCH_S, Key.of("more"), 60) == []


@settings(max_examples=examples(40))
@given(st.integers(0, 2**32))
def test_whatever_is_asked_and_found_the_counts_stay_exact_and_the_bounds_kept(seed: int) -> None:
    rng = random.Random(seed)
    hot, now = HotKeys(keys=6, bytes_=4000), 0.0
    keys = [Key.of(str(n)) for n in range(12)]
    wished: list[Key] = []
    for _ in range(200):
        now += rng.random()
        key, peer = rng.choice(keys), rng.choice(PEERS)
        match rng.randrange(4):
            case 0 | 1:
                if hot.asked(now, key, peer, rng.choice("abc"), rng.uniform(0, 90)):
                    assert key not in wished
                    wished.append(key)
            case 2 if wished:
                key = wished.pop(rng.randrange(len(wished)))
                hot.keep(now, key, _records(rng, key), rng.randrange(8))
            case _:
                hot.purge(now)
        age_s = rng.uniform(0, 100)
        found = hot.get(now, EPOCH_S, key, age_s)
        assert all(r.key == key for r in found)
        hot.check()


def _records(rng: random.Random, key: Key) -> list[Record]:
    return [record(signer(n), key, value=rng.randbytes(rng.randrange(900))) for n in range(rng.randrange(4))]


def test_a_node_looks_up_what_it_is_often_asked_for_and_answers_from_its_copy_only_those_that_allow_it() -> None:
    kad = node(neighbours=10)
    wanted = q.Find((KEY,), True, None, 0, 60)
    for asker in range(90, 93):
        outputs = kad.handle(1.0, q.Asked(7, contact(asker).peer, wanted))
        assert not of_kind(outputs, q.Ask)
    asks = of_kind(kad.handle(1.0, q.Asked(7, contact(93).peer, wanted)), q.Ask)
    assert asks
    assert all(isinstance(ask.request, q.Find) and ask.request.max_age_s == 0 for ask in asks)  # no copies of copies
    while asks:
        ask, reply = asks.pop(), q.Found(((record(),),), ())
        asks += of_kind(kad.handle(1.1, q.Answered(ask.id, reply)), q.Ask)
    assert len(kad.node.store) == 0
    assert _records_in(serve(kad, wanted, asker=50, now=2.0)) == (record(),)
    assert _records_in(serve(kad, q.Find((KEY,), True), asker=51, now=2.0)) == ()


def test_nobody_can_leave_a_copy_on_the_way_by_offering_it() -> None:
    kad = node(neighbours=60)
    key = next(k for k in (Key.of(f"far {n}") for n in range(999)) if kad.node.responder.is_far(0.0, k))
    planted = record(key=key)
    reply = serve(kad, q.StoreRecords((planted,)), asker=90)
    assert isinstance(reply, q.Stored)
    assert reply.verdicts[0][0] is Verdict.FAR
    assert _records_in(serve(kad, q.Find((key,), True, None, 0, 60), asker=50)) == ()


def test_a_forged_record_is_not_copied_and_its_sender_is_named() -> None:
    kad = node(neighbours=3)
    wanted = q.Find((KEY,), True, None, 0, 60)
    asks: list[q.Ask] = []
    for asker in range(90, 94):
        asks += of_kind(kad.handle(1.0, q.Asked(7, contact(asker).peer, wanted)), q.Ask)
    forged = Record(
        KEY, PeerId.from_public_key(b"v" * 32), b"", b"lie", 1, round((EPOCH_S + 600) * 1000), False, b"s" * 64
    )
    outputs = [out for ask in asks for out in kad.handle(1.1, q.Answered(ask.id, q.Found(((forged,),), ())))]
    assert {blame.peer for blame in of_kind(outputs, q.BlamePeer)} == {ask.contact.peer for ask in asks}
    assert _records_in(serve(kad, wanted, asker=50, now=2.0)) == ()


def _records_in(reply: q.Reply) -> tuple[Record, ...]:
    assert isinstance(reply, q.Found)
    return reply.records[0]
