"""The muxer's timers: waking when it asked to be woken always does something."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.wire.yamux.session import HEADER, PING, SYN, Dead, YamuxSession


@given(st.floats(min_value=0, max_value=1e9))
def test_a_silent_link_is_dead_at_the_very_instant_it_asked_for(started: float) -> None:
    mux = YamuxSession(initiator=True, now=started)
    for _ in range(10_000):
        now = mux.wake_at()
        if any(isinstance(event, Dead) for event in mux.wake(now)):
            break
        assert mux.wake_at() > now  # otherwise a driver would spin without letting time pass
    else:
        raise AssertionError("never declared dead")


def test_a_doubted_peer_that_stays_silent_is_soon_dead() -> None:
    mux = YamuxSession(initiator=True, now=0.0)
    assert mux.doubt(0.9) == 0.9  # it may still have said something a moment ago
    assert not mux.has_output
    mux.doubt(4.9)
    assert mux.has_output  # it is asked
    mux.wake(4.9)
    assert mux.wake_at() == 4.9 + mux.config.doubt_s
    mux.doubt(9.0)  # who waits for another call in vain prolongs nothing
    assert mux.wake(4.9 + mux.config.doubt_s) == [Dead(4.9 + mux.config.doubt_s)]


def test_any_word_of_a_doubted_peer_ends_the_doubt() -> None:
    mux = YamuxSession(initiator=True, now=0.0)
    mux.doubt(12.0)
    mux.receive(HEADER.pack(0, PING, SYN, 0, 7), 16.9)
    assert mux.wake(17.0) == []
    assert mux.wake_at() > 17.0


def test_a_doubted_peer_on_a_line_full_of_bulk_has_more_time() -> None:
    mux = YamuxSession(initiator=True, now=0.0)
    mux.rtt_s = 0.5
    mux.doubt(12.0)
    mux.wake(12.0)
    assert mux.wake(21.9) == []
    assert mux.wake(22.0) == [Dead(22.0)]


def test_a_doubted_peer_that_is_heard_elsewhere_has_little_time_left() -> None:
    mux = YamuxSession(initiator=True, now=0.0)
    mux.silence.hurry(11.0, 0.01)  # nobody had asked it
    assert mux.wake(11.0) == []
    mux.doubt(12.0)
    mux.silence.hurry(13.0, 0.01)
    assert mux.wake(13.9) == []
    assert mux.wake(14.0) == [Dead(14.0)]


def test_a_peer_that_was_asked_for_nobody_is_dead_no_sooner_unless_it_is_heard_elsewhere() -> None:
    mux = YamuxSession(initiator=True, now=0.0)
    mux.doubt(2.0, patient=True)
    assert mux.has_output
    assert mux.silence.doubted
    assert mux.silence.ends_at == mux.config.dead_after_s
    mux.silence.hurry(13.0, 1.0)
    assert mux.silence.ends_at == 18.0
    mux.receive(HEADER.pack(0, PING, SYN, 0, 7), 13.5)
    assert not mux.silence.doubted
    assert mux.silence.ends_at == 13.5 + mux.config.dead_after_s
