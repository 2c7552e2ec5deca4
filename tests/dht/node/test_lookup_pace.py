"""Round trips are learned per peer, unknown peers get the usual figures, and look-ups make use of both."""

from __future__ import annotations

import random

import pytest

from peerd.core.ids import Key, PeerId
from peerd.core.record import Record
from peerd.dht.node.key_search import Placement
from peerd.dht.node.lookup import Lookup, LookupGuide, LookupRule, State
from peerd.dht.node.routing_table import KEY_BITS, Contact, Table, place
from peerd.dht.node.store import Verdict
from peerd.wire.rate.round_trips import RoundTrips

TARGET = place(Key.of("target"))
EVERYWHERE = 1 << KEY_BITS


def contacts(count: int) -> list[Contact]:
    rng = random.Random(1)
    many = [Contact(PeerId.from_public_key(rng.randbytes(32))) for _ in range(count)]
    return sorted(many, key=lambda contact: contact.place ^ TARGET)


def seen(peers: list[Contact], seconds: float = 0.1) -> RoundTrips:
    trips = RoundTrips(0.6, 2.5)
    for contact in peers:
        trips.answered(contact.peer, seconds)
    return trips


def test_without_answers_the_usual_figure_holds_and_with_answers_the_observed_ones() -> None:
    known = contacts(12)
    trips = RoundTrips(0.6, 2.5)
    assert trips.patience_s(known[0].peer) == 0.6
    trips = seen(known[:10])
    assert trips.expected_s(known[11].peer) == pytest.approx(0.1)
    assert 0.05 <= trips.patience_s(known[11].peer) < 0.2
    for _ in range(20):
        trips.answered(known[0].peer, 0.5)
    assert trips.expected_s(known[0].peer) > 0.4
    assert trips.patience_s(known[0].peer) > trips.expected_s(known[0].peer)


def test_patience_is_bounded_both_ways() -> None:
    known = contacts(10)
    assert seen(known, 0.0).patience_s(known[0].peer) == 0.05
    assert seen(known, 100.0).patience_s(known[0].peer) == 2.5


def test_of_peers_that_are_near_enough_the_fastest_are_asked_first() -> None:
    known = contacts(8)
    trips = seen(known)
    for fast in (known[6], known[7]):
        for _ in range(30):
            trips.answered(fast.peer, 0.01)
    lookup = Lookup(TARGET, known, LookupRule(), guide=LookupGuide(trips, EVERYWHERE))
    assert {c.peer for c in lookup.next(0.0)[:2]} == {known[6].peer, known[7].peer}


def test_a_peer_that_takes_longer_than_usual_no_longer_holds_up_the_search() -> None:
    known = contacts(8)
    lookup = Lookup(TARGET, known, LookupRule(), guide=LookupGuide(seen(contacts(30)), EVERYWHERE))
    asked = lookup.next(0.0)
    wake = lookup.wake_at()
    assert wake is not None
    assert wake < 0.25
    assert len(lookup.next(wake)) == 4
    assert lookup.states()[asked[0].peer] is State.SLOW


def test_three_answers_that_hold_it_suffice_though_a_nearer_peer_was_not_asked() -> None:
    known = contacts(8)
    trips = seen(known)
    for _ in range(30):
        trips.answered(known[0].peer, 2.0)
    lookup = Lookup(TARGET, known, LookupRule(), guide=LookupGuide(trips, EVERYWHERE))
    asked = lookup.next(0.0)
    assert known[0] not in asked
    for contact in asked[:3]:
        lookup.answered(contact.peer, [], holds=True)
    assert lookup.next(0.1) == []
    assert lookup.why == "the near 3 peers have answered"


def test_a_find_that_few_confirm_needs_more_answers() -> None:
    known = contacts(8)
    lookup = Lookup(TARGET, known, LookupRule(doubt=1), guide=LookupGuide(seen(known), EVERYWHERE))
    first = lookup.next(0.0)
    for contact in first:
        lookup.answered(contact.peer, [], holds=contact is first[0])
    assert lookup.next(0.1) != []
    assert lookup.why is None


def test_peers_of_the_own_table_are_asked_before_a_circle_of_liars_ends_the_search() -> None:
    everybody = contacts(40)
    liars, own = everybody[:10], everybody[30:]
    lookup = Lookup(
        TARGET, own, LookupRule(want=4, roots=4), guide=LookupGuide(seen(everybody), everybody[12].place ^ TARGET)
    )
    asked: set[PeerId] = set()
    now = 0.0
    while lookup.why is None:
        for contact in lookup.next(now):
            asked.add(contact.peer)
            lookup.answered(contact.peer, liars)
        now += 0.01
    assert len(asked & {contact.peer for contact in own}) >= 4


def test_the_farthest_buckets_hold_more_peers_where_they_may() -> None:
    own = PeerId.from_public_key(b"o" * 32)
    table = Table(own, 4, wide=(32, 16))
    for contact in contacts(400):
        table.add(0.0, contact)
    table.check()
    sizes = [sum((c.place ^ place(own.key)).bit_length() == bit for c in table) for bit in (256, 255, 254)]
    assert sizes == [32, 16, 4]


def test_a_record_goes_to_another_peer_once_one_takes_longer_than_is_usual_for_it() -> None:
    known = contacts(4)
    trips = seen(known)
    for _ in range(30):
        trips.answered(known[1].peer, 0.5)
    record = Record(Key.of("target"), known[0].peer, b"", b"value", 1, 0)
    placement = Placement(record, known, 2, patience_s=trips.patience_s)
    assert placement.next(0.0) == known[:2]
    woken = placement.wake_at()
    assert woken == trips.patience_s(known[0].peer) < trips.patience_s(known[1].peer)
    assert placement.next(woken) == known[2:3]  # the first is late, the second is usually slower than that
    placement.answered(known[2].peer, Verdict.STORED, 1)
    placement.answered(known[0].peer, Verdict.STORED, 1)  # late, and yet it counts
    assert placement.done
    assert placement.holders == 2
