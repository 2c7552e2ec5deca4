"""Silence of the peer on one link: how long it may last, and how long once somebody doubts that the peer is there.

A doubted peer is asked. How long it may take to answer is measured: many round trips, and several times as long as it
took of late to answer such a question, since a busy machine answers late. Where nothing was measured a constant counts.
"""

from __future__ import annotations

import math
from typing import Final

from peerd.machine.mux.stream import YamuxConfig

_ASKED_AFTER_S: Final = 1.0  # of silence, by a peer that is doubted
_DOUBT_RTTS: Final = 20  # a line full of bulk makes a ping wait
_DOUBT_LEAST_S: Final = 2.5  # on the quickest line: a process may be paused for a moment
_DOUBT_FACTOR: Final = 4.0  # times as long as it took to answer before
_KEPT: Final = 0.8  # of the longest time to answer, at each shorter one
_HURRY_S: Final = 1.0  # that a doubted peer has left once it is heard on another link, which shares the line's bulk
_HURRY_RTTS: Final = 5


class Silence:
    """The time since anything came from the peer, and the time at which the link is taken for dead."""

    def __init__(self, config: YamuxConfig, now: float) -> None:
        self._config = config
        self.heard_at = now  # when bytes of the peer came in last, of whatever kind
        self.doubted_at: float | None = None  # when the peer was asked first; None: it was not, or was heard since
        self._doubted_until = math.inf
        self._answered_s = 0.0  # from a question to the answer: the longest time of late

    @property
    def doubted(self) -> bool:
        """True from the moment that the peer was asked whether it is there until anything at all comes from it."""
        return self.doubted_at is not None

    @property
    def ends_at(self) -> float:
        """Time at which a peer that says nothing until then is taken for dead."""
        return min(self.heard_at + self._config.dead_after_s, self._doubted_until)

    def lasts_s(self, now: float) -> float:
        """Seconds since the peer was last heard."""
        return now - self.heard_at

    def ended(self, now: float) -> None:
        """Something came from the peer."""
        self.heard_at = now
        if self.doubted_at is not None:
            self._answered_s = max(now - self.doubted_at, _KEPT * self._answered_s)
        self.doubted_at, self._doubted_until = None, math.inf

    def doubt(self, now: float, rtt_s: float | None, *, patient: bool = False) -> bool:
        """Doubt that the peer is there, if it has said nothing for a while; True: ask it.

        `patient`: nobody waits, so that it is taken for dead no sooner than otherwise, but by `hurry`.
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
        """The peer, which is doubted, was heard on another link: it is soon taken for dead on this one."""
        if self.doubted:
            self._doubted_until = min(self._doubted_until, now + max(_HURRY_S, _HURRY_RTTS * (rtt_s or 0.0)))
