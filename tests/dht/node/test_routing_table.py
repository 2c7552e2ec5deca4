"""The routing table keeps its invariants whatever comes, old peers keep their seats, networks cannot crowd it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import LocalError
from peerd.core.ids import Key, PeerId
from peerd.dht.node.routing_table import Contact, Table, network_of, place

OWN = PeerId.from_public_key(b"o" * 32)


def peer(number: int) -> PeerId:
    return PeerId.from_public_key(number.to_bytes(32, "big"))


def public(number: int, network: int = 0) -> tuple[bytes, ...]:
    return (bytes([4, 50 + network, 1, 1, number, 6, 15, 161]),)


def far_contacts(count: int, network: int = 0, start: int = 0) -> list[Contact]:
    """Peers of the farthest bucket, which half of all peers belong to."""
    found: list[Contact] = []
    while len(found) < count:
        contact = Contact(peer(start), public(start % 250, network))
        start += 1
        if (contact.place ^ place(OWN.key)).bit_length() == 256:
            found.append(contact)
    return found


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 8))
def test_any_sequence_of_changes_keeps_the_invariants(seed: int, k: int) -> None:
    rng = random.Random(seed)
    table = Table(OWN, k)
    for step in range(150):
        contact = Contact(peer(rng.randrange(60)), public(rng.randrange(5), rng.randrange(3)))
        action = rng.random()
        if action < 0.6:
            table.add(float(step), contact)
        elif action < 0.8:
            table.seen(float(step), contact.peer)
        else:
            newcomer = table.remove(contact.peer)
            assert contact.peer not in table
            if newcomer is not None:
                table.add(float(step), newcomer)
        table.check()
    assert len(table) == len(list(table))


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(0, 30))
def test_closest_is_what_sorting_everybody_gives(seed: int, count: int) -> None:
    rng = random.Random(seed)
    table = Table(OWN, 5)
    for number in rng.sample(range(1000), 80):
        table.add(0.0, Contact(peer(number)))
    target = rng.getrandbits(256)
    barred = {contact.peer for contact in table if rng.random() < 0.3}
    expected = sorted((c for c in table if c.peer not in barred), key=lambda c: c.place ^ target)[:count]
    assert table.closest(target, count, lambda p: p not in barred) == expected
    assert table.closest(place(OWN.key), 100) == sorted(table, key=lambda c: c.place ^ place(OWN.key))


def test_a_full_bucket_keeps_its_old_peers_and_names_the_one_to_probe() -> None:
    table = Table(OWN, 3)
    old = [Contact(c.peer) for c in far_contacts(4)]
    for when, contact in enumerate(old[:3]):
        assert table.add(float(when), contact) == (True, None)
    table.seen(5.0, old[0].peer)
    assert table.add(6.0, old[3]) == (False, old[1])
    assert old[3].peer not in table
    assert table.remove(old[1].peer) == old[3]
    assert table.add(7.0, old[3]) == (True, None)
    assert [c.peer in table for c in old] == [True, False, True, True]


def test_hearing_from_a_seated_peer_updates_its_addresses() -> None:
    table = Table(OWN)
    table.add(0.0, Contact(peer(1), public(1)))
    table.add(1.0, Contact(peer(1), public(2)))
    found = table.contact(peer(1))
    assert found is not None
    assert found.addrs == public(2)
    assert table.seen_at(peer(1)) == 1.0


def test_we_are_never_in_our_own_table() -> None:
    table = Table(OWN)
    assert table.add(0.0, Contact(OWN, public(1))) == (False, None)
    assert len(table) == 0


def test_a_crowding_network_gives_way_to_a_rarer_one_but_only_in_a_full_bucket() -> None:
    table = Table(OWN, 8)
    crowd = far_contacts(8, network=1)
    for contact in crowd:
        assert table.add(0.0, contact)[0]  # while there is room, nobody is turned away
    rare = far_contacts(6, network=2, start=10_000)
    assert table.add(1.0, rare[0])[0]
    assert table.add(1.0, rare[1])[0]
    assert not table.add(1.0, rare[2])[0]  # its network has its share now
    assert sum(contact.peer in table for contact in crowd) == 6
    table.check()


@pytest.mark.parametrize(
    ("addr", "network"),
    [
        (bytes([4, 8, 8, 8, 8, 6, 0, 80]), bytes([4, 8, 8, 8])),
        (bytes([4, 127, 0, 0, 1, 6, 0, 80]), None),
        (bytes([4, 192, 168, 1, 1]), None),
        (bytes([4, 172, 20, 1, 1]), None),
        (bytes([4, 100, 64, 1, 1]), None),
        (bytes([0x29]) + bytes.fromhex("20010db8000100020000000000000001"), bytes.fromhex("2920010db80001")),
        (bytes([0x29]) + bytes(15) + b"\1", None),
        (b"\x36\x03abc", None),
        (b"", None),
    ],
)
def test_networks_are_told_apart_by_their_public_prefix(addr: bytes, network: bytes | None) -> None:
    assert network_of([addr]) == network


def test_buckets_are_refreshed_once_per_period_and_a_search_counts() -> None:
    table = Table(OWN)
    assert table.refresh_due(0.0, 100.0) == []
    for contact in far_contacts(3):
        table.add(0.0, contact)
    assert table.refresh_due(50.0, 100.0) == []
    table.searched(60.0, far_contacts(1)[0].place)
    assert 256 not in table.refresh_due(120.0, 100.0)
    assert 256 in table.refresh_due(170.0, 100.0)
    assert 256 not in table.refresh_due(171.0, 100.0)


def test_a_key_drawn_for_a_bucket_lies_in_it() -> None:
    table, rng = Table(OWN), random.Random(1)
    for index in (1, 2, 100, 256):
        assert (place(table.key_in(index, rng)) ^ place(OWN.key)).bit_length() == index
    with pytest.raises(LocalError):
        table.key_in(0, rng)


def test_the_distance_of_places_is_the_distance_of_keys() -> None:
    one, other = Key.of("one"), Key.of("other")
    assert place(one) ^ place(other) == one.distance(other)
