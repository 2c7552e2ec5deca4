"""Silence of the peer on one link: how long it may last, and how long once a caller suspects that the peer is dead.

A suspected peer is pinged. Its time to answer is derived from measurements: many round trips, and several times the
longest recent answer to such a ping, because a busy machine answers late. Without measurements a constant is used.
"""

from __future__ import annotations

import math
from typing import Final

from peerd.wire.yamux.stream import YamuxConfig

_ASKED_AFTER_S: Final = 1.0  # silence after which a suspected peer is pinged
_DOUBT_RTTS: Final = 20  # allowed round trips: a line full of bulk data delays a ping
_DOUBT_LEAST_S: Final = 2.5  # even on the fastest line, because a process may be paused for a moment
_DOUBT_FACTOR: Final = 4.0  # multiple of the longest recent time to answer
_KEPT: Final = 0.8  # decay of the longest time to answer at each shorter one
_HURRY_S: Final = 1.0  # time left for a suspected peer once it answers on another link, which shares the same line
_HURRY_RTTS: Final = 5


class Silence:
    """The time since the peer was last heard from, and the time at which the link counts as dead."""

    def __init__(self, config: YamuxConfig, now: float) -> None:
        self._config = config
        self.heard_at = now  # when the last bytes of the peer arrived
        self.doubted_at: float | None = None  # time of the first ping on suspicion; None if not suspected
        self._doubted_until = math.inf
        self._answered_s = 0.0  # longest recent time from such a ping to the next bytes

    @property
    def doubted(self) -> bool:
        """True from the first ping on suspicion until anything arrives from the peer."""
        return self.doubted_at is not None

    @property
    def ends_at(self) -> float:
        """Time at which a peer that stays silent counts as dead."""
        return min(self.heard_at + self._config.dead_after_s, self._doubted_until)

    def lasts_s(self, now: float) -> float:
        """Seconds since the last bytes from the peer."""
        return now - self.heard_at

    def ended(self, now: float) -> None:
        """Record that bytes arrived from the peer."""
        self.heard_at = now
        if self.doubted_at is not None:
            self._answered_s = max(now - self.doubted_at, _KEPT * self._answered_s)
        self.doubted_at, self._doubted_until = None, math.inf

    def doubt(self, now: float, rtt_s: float | None, *, patient: bool = False) -> bool:
        """Suspect the peer if it has been silent for a while; returns True if it should be pinged.

        `patient`: nobody waits for it, so its deadline stays as it is, except after `hurry`.
        """
        if self.lasts_s(now) < _ASKED_AFTER_S:
            return False
        if self.doubted_at is None:
            self.doubted_at = now
        if not patient:
            self._doubted_until = min(self._doubted_until, now + self._patience_s(rtt_s))
        return True

    def _patience_s(self, rtt_s: float | None) -> float:
        if rtt_s is None:
            return self._config.doubt_s
        return max(_DOUBT_LEAST_S, _DOUBT_RTTS * rtt_s, _DOUBT_FACTOR * self._answered_s)

    def hurry(self, now: float, rtt_s: float | None) -> None:
        """Shorten the deadline of a suspected peer, because it has answered on another link."""
        if self.doubted:
            self._doubted_until = min(self._doubted_until, now + max(_HURRY_S, _HURRY_RTTS * (rtt_s or 0.0)))
