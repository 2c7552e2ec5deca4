"""Look-ups end, stay within their parallelism, return the nearest, and say why they stopped."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from peerd.core.ids import Key, PeerId
from peerd.dht.node.lookup import Lookup, LookupRule, State
from peerd.dht.node.routing_table import Contact, place

RULE = LookupRule()
TARGET = place(Key.of("target"))


def contacts(count: int, seed: int = 1) -> list[Contact]:
    rng = random.Random(seed)
    many = [Contact(PeerId.from_public_key(rng.randbytes(32))) for _ in range(count)]
    return sorted(many, key=lambda contact: contact.place ^ TARGET)


def test_a_lookup_asks_the_nearest_first_and_no_more_than_its_parallelism() -> None:
    known = contacts(10)
    lookup = Lookup(TARGET, reversed(known), RULE)
    assert lookup.next(0.0) == known[:4]
    assert lookup.next(0.0) == []
    lookup.answered(known[0].peer, [])
    assert lookup.next(0.1) == [known[4]]


def test_a_search_without_a_find_ends_when_all_that_should_hold_it_have_answered() -> None:
    known = contacts(10)
    lookup = Lookup(TARGET, known, RULE)
    rounds = 0
    while lookup.why is None:
        asked = lookup.next(float(rounds))
        for contact in asked:
            lookup.answered(contact.peer, known)
        rounds += 1
    assert lookup.asked == RULE.want
    assert rounds == 3  # the first four, then the rest of the eight at once, then the end
    assert lookup.why == "the nearest 8 peers have answered"


def test_three_nearest_answers_suffice_once_something_was_found() -> None:
    known = contacts(10)
    lookup = Lookup(TARGET, known, RULE)
    asked = lookup.next(0.0)
    lookup.found = True
    for contact in (asked[0], asked[1], asked[3]):  # the third is slower than the fourth
        lookup.answered(contact.peer, known)
    assert lookup.next(0.1) == []
    assert lookup.why == "the nearest 3 peers have answered"


def test_a_find_far_away_does_not_end_the_search_while_nearer_peers_are_unasked() -> None:
    near, far = contacts(10)[:5], contacts(10)[5:]
    lookup = Lookup(TARGET, far, RULE)
    asked = lookup.next(0.0)
    lookup.found = True
    for contact in asked:
        lookup.answered(contact.peer, near)
    assert lookup.next(0.1) == near[:3]
    assert lookup.why is None


def test_a_slow_peer_is_overtaken_and_may_still_answer() -> None:
    known = contacts(6)
    lookup = Lookup(TARGET, known[:4], RULE)
    assert len(lookup.next(0.0)) == 4
    lookup.learn(known)
    assert lookup.next(0.5) == []
    assert lookup.wake_at() == 1.0
    assert lookup.next(1.0) == known[4:]
    assert lookup.states()[known[0].peer] is State.SLOW
    lookup.answered(known[0].peer, [])
    assert lookup.states()[known[0].peer] is State.ANSWERED


def test_lookup_ends_when_every_peer_is_silent() -> None:
    lookup = Lookup(TARGET, contacts(20), RULE)
    now, asked = 0.0, 0
    while lookup.why is None:
        asked += len(lookup.next(now))
        now = lookup.wake_at() or now
        assert now < 120
    assert asked == 20
    assert lookup.why == "none of the known peers answered"
    assert now <= RULE.silent_s + 5 * RULE.slow_s


def test_it_waits_for_slow_peers_while_too_few_have_answered() -> None:
    known = contacts(2)
    lookup = Lookup(TARGET, known, RULE)
    lookup.next(0.0)
    assert lookup.next(1.5) == []
    assert lookup.why is None
    lookup.answered(known[1].peer, [])
    lookup.next(2.0)
    assert lookup.why is None  # the other one may still know more
    lookup.answered(known[0].peer, [])
    lookup.next(2.0)
    assert lookup.why == "all known peers have answered or failed"


def test_alone_it_ends_at_once() -> None:
    lookup = Lookup(TARGET, [], RULE)
    assert lookup.next(0.0) == []
    assert lookup.why == "no other peer is known"
    own = contacts(1)[0]
    lookup = Lookup(TARGET, [], RULE, own=own)
    assert lookup.next(0.0) == []
    assert lookup.why is not None
    assert lookup.nearest(8) == [own]


def test_a_postponed_peer_is_asked_again() -> None:
    known = contacts(1)
    lookup = Lookup(TARGET, known, RULE)
    assert lookup.next(0.0) == known
    lookup.postponed(known[0].peer)
    assert lookup.next(0.1) == known


def test_a_peer_that_invents_ever_nearer_peers_is_not_followed_for_ever() -> None:
    rng = random.Random(5)
    seeds = contacts(3)
    lookup = Lookup(TARGET, seeds, RULE)
    now, steps = 0.0, 0
    while lookup.why is None:
        for contact in lookup.next(now):
            invented = [Contact(PeerId.from_public_key(rng.randbytes(32))) for _ in range(64)]
            lookup.answered(contact.peer, invented)
        now = min(now + 0.1, lookup.wake_at() or now + 0.1)
        steps += 1
        assert steps < 10_000
    assert lookup.asked <= RULE.max_asked
    assert len(lookup.states()) <= RULE.keep


@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_any_lookup_ends_sorted_and_within_its_bounds(seed: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    network = contacts(data.draw(st.integers(0, 80)), seed)
    rule = LookupRule(
        want=data.draw(st.integers(1, 20)),
        enough=data.draw(st.integers(1, 5)),
        parallel=data.draw(st.integers(1, 6)),
        max_asked=data.draw(st.integers(20, 64)),
        keep=data.draw(st.integers(30, 128)),
    )
    lookup = Lookup(TARGET, rng.sample(network, min(len(network), 5)), rule)
    waiting: list[Contact] = []
    now = 0.0
    for _ in range(20_000):
        waiting += lookup.next(now)
        if lookup.why is not None:
            break
        assert lookup.asked <= rule.max_asked
        states = list(lookup.states().values())
        assert states.count(State.WAITING) <= max(rule.parallel, rule.want)
        assert len(states) <= rule.keep
        if waiting and rng.random() < 0.7:
            contact = waiting.pop(rng.randrange(len(waiting)))
            fate = rng.random()
            if fate < 0.6:
                lookup.answered(contact.peer, rng.sample(network, min(len(network), 10)))
                lookup.found |= rng.random() < 0.2
            elif fate < 0.8:
                lookup.failed(contact.peer)
            elif fate < 0.9 and lookup.asked < 15:
                lookup.postponed(contact.peer)  # else: silent for ever
        wake = lookup.wake_at()
        now = max(now, wake) if wake is not None and not waiting else now + rng.random()
    assert lookup.why is not None
    assert lookup.next(now) == []
    nearest = [contact.place ^ TARGET for contact in lookup.nearest(100)]
    assert nearest == sorted(nearest)


@given(seed=st.integers(0, 2**32 - 1))
def test_with_honest_answers_it_returns_exactly_the_nearest(seed: int) -> None:
    """Every peer knows its 20 nearest and 10 others; the look-up must find the true nearest."""
    rng = random.Random(seed)
    network = contacts(60, seed)
    knows = {
        c.peer: sorted(network, key=lambda other: other.place ^ c.place)[:20] + rng.sample(network, 10) for c in network
    }
    lookup = Lookup(TARGET, rng.sample(network, 3), LookupRule(want=8))
    now = 0.0
    while lookup.why is None:
        for contact in lookup.next(now):
            named = sorted(knows[contact.peer], key=lambda other: other.place ^ TARGET)[:20]
            lookup.answered(contact.peer, named)
        now += 0.01
    assert lookup.nearest(8) == network[:8]
