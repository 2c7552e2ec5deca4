"""The muxer's timers: waking when it asked to be woken always does something."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.machine.yamux import Dead, Yamux


@given(st.floats(min_value=0, max_value=1e9))
def test_a_silent_link_is_dead_at_the_very_instant_it_asked_for(started: float) -> None:
    mux = Yamux(initiator=True, now=started)
    for _ in range(10_000):
        now = mux.wake_at()
        if any(isinstance(event, Dead) for event in mux.wake(now)):
            break
        assert mux.wake_at() > now  # otherwise a driver would spin without letting time pass
    else:
        raise AssertionError("never declared dead")
