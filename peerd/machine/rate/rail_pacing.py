"""Pacing of the rails of one link: together they send only slightly faster than the path has recently carried.

Each connection finds its own rate from what it got while others paused; a dozen of them together assume several times
the path's rate. While credit arrives at the rate of delivered data this does no harm. But much data may be allowed at
once, because a piece that all waited for has arrived, or because several connections have just ended a measurement in
which they pause (BBR's PROBE_RTT). Then they would fill the queue at the bottleneck within a tenth of a second, and
lose more than they had waited for. So once the rate no longer grows, each rail may send at its share of the carried
rate plus a third, which is enough for the others to make up for a few that pause. Sans-IO; the rate is measured from
the other side's acknowledgements. A peer can only slow down traffic to itself.
"""

from __future__ import annotations

import math
from typing import Final

from peerd.machine.rate.delivery_rate import PathRate

_LOOKS: Final = 16  # samples whose rates count
_LOOK_S_MIN: Final = 0.05
_GAP_LOOKS: Final = 3  # longest usable interval between two samples, in usual pauses
_GAIN: Final = 4 / 3
_LEAST_BYTES_PER_S: Final = 40e6  # least rate of all rails together, which no relevant path minds


class RailPace:
    """Pace of one link's rails; times in seconds."""

    __slots__ = ("_acked_bytes", "_begun_at", "_path")

    def __init__(self) -> None:
        self._begun_at, self._acked_bytes = -math.inf, 0
        self._path = PathRate(_LOOKS)

    def look(self, now: float, rtt_s: float, acked_bytes: int, rails: int) -> float:
        """Rate in bytes/s for each of `rails`, infinity for no limit; `acked_bytes`: total acknowledged on all."""
        passed_s, carried = now - self._begun_at, acked_bytes - self._acked_bytes
        self._begun_at, self._acked_bytes = now, acked_bytes
        # `carried` is negative if a rail was closed, because its count is then missing.
        if carried >= 0 and 0 < passed_s <= _GAP_LOOKS * self.pause_s(rtt_s):
            self._path.add(carried / passed_s)
        if not rails or self._path.grows:
            return math.inf
        return _GAIN * max(self._path.carried, _LEAST_BYTES_PER_S) / rails

    def pause_s(self, rtt_s: float | None) -> float:
        """Seconds before the next sample."""
        return max(rtt_s or 0.0, _LOOK_S_MIN)
