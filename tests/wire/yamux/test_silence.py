"""How long a doubted peer may stay silent: as long as it was measured to take, and not a constant."""

from __future__ import annotations

from peerd.wire.yamux.silence import Silence
from peerd.wire.yamux.stream import YamuxConfig


def patience_s(silence: Silence, now: float, rtt_s: float | None) -> float:
    """Seconds from a doubt at `now` until the peer is taken for dead."""
    assert silence.doubt(now, rtt_s)
    return round(silence.ends_at - now, 3)


def test_a_peer_nearby_has_less_time_than_one_of_which_nothing_was_measured() -> None:
    assert patience_s(Silence(YamuxConfig(), 0.0), 2.0, None) == 5.0
    assert patience_s(Silence(YamuxConfig(), 0.0), 2.0, 0.001) == 2.5
    assert patience_s(Silence(YamuxConfig(), 0.0), 2.0, 0.3) == 6.0


def test_a_peer_that_answers_late_has_longer_the_next_time_and_that_fades() -> None:
    silence = Silence(YamuxConfig(), 0.0)
    silence.doubt(2.0, 0.001)
    silence.ended(4.0)
    assert patience_s(silence, 6.0, 0.001) == 8.0
    for step in range(5):
        silence.ended(6.1 + 2 * step)
        silence.doubt(8.0 + 2 * step, 0.001)
    assert silence.ends_at - 16.0 < 4.0
