"""Pacing of the rails of one link: together they send little faster than the path has carried of late.

Each connection finds a rate for itself, from what it got while others paused; a dozen of them believe in several times
what the path carries. While credit comes at the rate of what arrives that does no harm. But when much is allowed at
once, because a piece that all waited for has come, or because several connections have just ended a measurement in
which they rest (BBR's PROBE_RTT), they would fill the queue at the narrowest place within a tenth of a second, and lose
more than what they waited for. So, once the rate no longer grows, each may send its share of what was carried and a
third more: enough for the others to make up for a few that rest.
Sans-IO; the rate is what the other side has acknowledged. A peer can slow down what is sent to itself.
"""

from __future__ import annotations

import math
from typing import Final

from peerd.machine.rate.delivery_rate import PathRate

_LOOKS: Final = 16  # whose rates count
_LOOK_S_MIN: Final = 0.05
_GAP_LOOKS: Final = 3  # times the pause between them: after more a look says nothing
_GAIN: Final = 4 / 3
_LEAST_BYTES_PER_S: Final = 40e6  # together, whatever was seen: a start that no path of interest minds


class RailPace:
    """Pace of one link's rails; times in seconds."""

    __slots__ = ("_acked_bytes", "_begun_at", "_path")

    def __init__(self) -> None:
        self._begun_at, self._acked_bytes = -math.inf, 0
        self._path = PathRate(_LOOKS)

    def look(self, now: float, rtt_s: float, acked_bytes: int, rails: int) -> float:
        """Bytes/s that each of so many rails may send, once `acked_bytes` of all have been acknowledged; inf: any."""
        passed_s, carried = now - self._begun_at, acked_bytes - self._acked_bytes
        self._begun_at, self._acked_bytes = now, acked_bytes
        # Fewer than before: a rail has gone, with what it had counted.
        if carried >= 0 and 0 < passed_s <= _GAP_LOOKS * self.pause_s(rtt_s):
            self._path.add(carried / passed_s)
        if not rails or self._path.grows:
            return math.inf
        return _GAIN * max(self._path.carried, _LEAST_BYTES_PER_S) / rails

    def pause_s(self, rtt_s: float | None) -> float:
        """Pause before the next look."""
        return max(rtt_s or 0.0, _LOOK_S_MIN)
