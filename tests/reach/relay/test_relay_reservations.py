"""Places at relays: two of them, in different networks, renewed in time, and replaced at once."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from peerd.core.addr import tcp_addr
from peerd.core.keys import Keypair
from peerd.reach.relay.relay_reservations import Candidate, FindRelays, Release, Reservations, Reserve

PEERS = [Keypair.from_seed(bytes([number]) * 32).peer_id for number in range(8)]


def candidate(number: int, *, network: int | None = None, rtt_s: float = 0.1, preferred: bool = False) -> Candidate:
    at = tcp_addr(f"{80 + (number if network is None else network)}.1.0.{number + 1}", 4001)
    return Candidate(PEERS[number], at, rtt_s, preferred)


def wanting(*candidates: Candidate) -> Reservations:
    made = Reservations(random.Random(1))
    made.want(True)
    for one in candidates:
        made.offers(one)
    return made


def asked(outputs: list[Reserve | Release | FindRelays]) -> list[int]:
    return [PEERS.index(output.peer) for output in outputs if isinstance(output, Reserve)]


def test_nothing_is_asked_while_no_place_is_wanted() -> None:
    made = wanting(candidate(0))
    made.want(False)
    assert made.step(0.0) == []
    assert made.wake_at(0.0) == math.inf


def test_two_are_asked_first_those_through_whom_we_joined_then_other_networks_then_the_nearest() -> None:
    nearest, other = candidate(0, network=1, rtt_s=0.01), candidate(1, network=2, rtt_s=0.2)
    first = candidate(2, network=1, rtt_s=0.5, preferred=True)
    assert asked(wanting(nearest, other, first).step(0.0)) == [2, 1]
    assert asked(wanting(nearest, candidate(3, network=1)).step(0.0)) == [0, 3]


def test_a_place_is_renewed_before_its_end_and_again_soon_if_that_fails() -> None:
    made = wanting(candidate(0), candidate(1))
    made.step(0.0)
    made.granted(0.0, PEERS[0], 100.0)
    made.granted(0.0, PEERS[1], 3600.0)
    assert made.step(0.0) == []
    assert made.wake_at(0.0) == 60.0
    assert asked(made.step(60.0)) == [0]
    made.refused(60.0, PEERS[0])
    assert made.held(60.0) == PEERS[:2]
    assert asked(made.step(70.0)) == [0]


def test_a_lost_relay_is_replaced_at_once_and_there_is_a_search_if_nobody_is_left() -> None:
    made = wanting(candidate(0), candidate(1))
    made.step(0.0)
    made.granted(0.0, PEERS[0], 3600.0)
    made.granted(0.0, PEERS[1], 3600.0)
    made.offers(candidate(2))
    assert made.step(5.0) == []
    made.gone(10.0, PEERS[0])
    assert asked(made.step(10.0)) == [2]
    made.granted(10.0, PEERS[2], 3600.0)
    made.gone(20.0, PEERS[1])
    assert made.step(20.0) == [FindRelays()]
    assert made.step(20.0) == []
    assert 20.0 < made.wake_at(20.0) <= 25.0


def test_a_relay_that_is_reached_anew_is_asked_again_and_its_place_is_lost_if_it_refuses() -> None:
    made = wanting(candidate(0), candidate(1))
    made.step(0.0)
    made.granted(0.0, PEERS[0], 3600.0)
    assert not made.moved(0.0, PEERS[2])
    assert made.moved(0.0, PEERS[1])  # while it is asked
    made.granted(0.0, PEERS[1], 3600.0)
    assert asked(made.step(0.0)) == [1]
    made.granted(0.0, PEERS[1], 3600.0)
    assert made.step(0.0) == []
    assert made.moved(10.0, PEERS[0])
    assert asked(made.step(10.0)) == [0]
    assert made.held(10.0) == PEERS[:2]
    made.offers(candidate(2))
    made.refused(10.0, PEERS[0])
    assert made.held(10.0) == [PEERS[1]]
    assert asked(made.step(10.0)) == [2]


def test_a_relay_that_refuses_is_asked_ever_more_rarely() -> None:
    made, now, pauses = wanting(candidate(0)), 0.0, []
    for _ in range(5):
        while not asked(made.step(now)):
            now = made.wake_at(now)
        began = now
        made.refused(now, PEERS[0])
        while not made._relays[PEERS[0]].not_before <= now:
            made.step(now)
            now = made.wake_at(now)
        pauses.append(now - began)
    assert pauses == [5.0, 10.0, 20.0, 40.0, 80.0]


def test_places_are_given_up_when_they_are_not_needed_any_more() -> None:
    made = wanting(candidate(0))
    made.step(0.0)
    made.granted(0.0, PEERS[0], 3600.0)
    made.want(False)
    assert made.step(1.0) == [Release(PEERS[0])]
    assert made.held(1.0) == []


def test_one_that_can_be_dialed_has_a_spare_place_and_looks_for_no_relay() -> None:
    made = wanting()
    made.want(False, spare=True)
    assert made.step(0.0) == []
    assert made.wake_at(0.0) == math.inf
    made.offers(candidate(0))
    made.offers(candidate(1))
    assert len(asked(made.step(1.0))) == 1


def test_of_several_places_a_spare_one_is_left_when_they_are_not_needed_any_more() -> None:
    made = wanting(candidate(0), candidate(1))
    made.step(0.0)
    made.granted(0.0, PEERS[0], 3600.0)
    made.granted(0.0, PEERS[1], 3600.0)
    made.want(False, spare=True)
    (released,) = made.step(1.0)
    assert isinstance(released, Release)
    assert {released.peer, *made.held(1.0)} == {PEERS[0], PEERS[1]}


STEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 7), st.floats(0, 50)), max_size=60)


@given(STEPS, st.integers(0, 1 << 30))
def test_in_any_order_of_events_no_relay_is_asked_twice_at_once_and_no_more_than_are_missing(
    steps: list[tuple[int, int, float]], seed: int
) -> None:
    made, now, open_ = Reservations(random.Random(seed)), 0.0, set[int]()
    for what, number, pause_s in steps:
        now += pause_s
        if what == 0:
            made.want(bool(number % 4), spare=bool(number % 3))
        elif what == 1:
            made.gone(now, PEERS[number])
        elif what == 2 and number in open_:
            open_.remove(number)
            made.granted(now, PEERS[number], 30.0 + pause_s)
        elif what == 3 and number in open_:
            open_.remove(number)
            made.refused(now, PEERS[number])
        elif what == 4:
            made.moved(now, PEERS[number])
        else:
            made.offers(candidate(number))
        new = asked(made.step(now))
        assert not open_ & set(new)
        open_ |= set(new)
        assert made.step(now) == []
        assert made.wake_at(now) > now
        made.check(now)
