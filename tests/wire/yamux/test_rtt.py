"""Pings beside bulk: what waits on the way is known within a round trip, whatever the peer answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.wire.noise.noise import PLAIN_BYTES
from peerd.wire.yamux.frames import ACK, HEADER, PING, SYN
from peerd.wire.yamux.rtt import RttPings
from peerd.wire.yamux.session import YamuxSession
from peerd.wire.yamux.striping import PLACED, PLACED_HEADER, StripedLane

RTT_S = 0.1


def test_what_waits_is_what_four_answers_in_a_row_took_beyond_the_idle_path() -> None:
    pings = RttPings()
    assert pings.queue_s(0.0, RTT_S) is None
    found = []
    for number, took_s in enumerate([0.1, 0.15, 0.14, 0.3, 0.2, 0.25, 0.1]):
        value = pings.send(float(number))
        assert pings.answered(value, number + took_s) == pytest.approx(took_s)
        found.append(pings.queue_s(number + took_s, RTT_S))
    assert found == pytest.approx([0.0, 0.0, 0.0, 0.0, 0.04, 0.04, 0.0])


def overdue() -> RttPings:
    """Four that were sent within a tenth of a second, and an answer before them that came in time."""
    pings = RttPings()
    pings.answered(pings.send(0.0), 0.1)
    for number in range(4):
        pings.send(1 + number / 40)
    return pings


def test_answers_that_are_late_say_so_before_they_come() -> None:
    pings, found = overdue(), list[float | None]()
    for number in range(100):
        found.append(pings.queue_s(1.1 + number / 100, RTT_S))
    assert found[7] == 0.0
    assert found[-1] == pytest.approx(2.09 - 1.075 - RTT_S)


def test_who_slept_does_not_blame_the_path_for_answers_that_it_has_not_read() -> None:
    pings = overdue()
    assert pings.queue_s(1.1, RTT_S) == 0.0
    assert pings.queue_s(1.5, RTT_S) == 0.0


def test_what_the_system_measures_is_believed_and_nothing_is_asked_while_it_is_new() -> None:
    pings = overdue()
    assert pings.due(2.0, RTT_S)
    pings.told(2.0, 0.13)
    assert not pings.due(2.4, RTT_S)
    assert pings.queue_s(2.4, RTT_S) == pytest.approx(0.03)
    pings.told(2.4, 0.09)
    assert pings.queue_s(2.5, RTT_S) == 0.0
    assert pings.due(3.0, RTT_S)


def test_several_are_under_way_and_never_too_many() -> None:
    pings, sent = RttPings(), 0
    for tick in range(1000):
        if pings.due(tick / 100, RTT_S):
            pings.send(tick / 100)
            sent += 1
    assert 8 <= sent <= 16
    assert not pings.idle


def test_answers_to_later_ones_make_up_for_those_that_were_skipped() -> None:
    pings = RttPings()
    first, second = pings.send(0.0), pings.send(0.1)
    assert pings.answered(second, 0.25) == pytest.approx(0.15)
    assert pings.answered(first, 0.3) is None
    assert pings.idle


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.floats(0, 2)), max_size=60))
def test_whatever_is_answered_nothing_waits_for_less_than_no_time(steps: list[tuple[bool, int, float]]) -> None:
    pings, now = RttPings(), 0.0
    for sends, value, passed_s in steps:
        now += passed_s
        if not sends:
            pings.answered(value, now)
        elif pings.due(now, RTT_S):
            pings.send(now)
        waits_s = pings.queue_s(now, RTT_S)
        assert waits_s is None or waits_s >= 0


def pings_in(mux: YamuxSession) -> list[int]:
    """Values of the pings that a session has to send now."""
    into = memoryview(bytearray(PLAIN_BYTES))
    sent = bytes(into[: mux.fill(into)])
    heads = [HEADER.unpack_from(sent, at) for at in range(0, len(sent), HEADER.size)]
    return [value for _, kind, flags, _, value in heads if kind == PING and flags & SYN]


def test_whoever_receives_a_striped_stream_pings_eight_times_a_round_trip() -> None:
    mux, lane = YamuxSession(initiator=False, now=0.0), StripedLane(main=False)
    mux.takes_placed, mux.rtt_min_s = True, RTT_S
    mux.receive(HEADER.pack(0, 0, SYN, 1, 0), 0.0)
    assert pings_in(mux) == []
    values, size = [], 1000
    for number in range(100):
        now = number * RTT_S / 100
        mux.receive(PLACED_HEADER.pack(0, PLACED, 0, 1, size, number * size) + bytes(size), now, lane)
        values += pings_in(mux)
    assert values == [1, 2, 3, 4, 5, 6, 7, 8]
    mux.receive(HEADER.pack(0, PING, ACK, 0, 1), 0.12)
    assert mux.rtt_min_s == RTT_S
