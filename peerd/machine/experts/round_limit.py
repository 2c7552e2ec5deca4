"""Time limit of a round of calls to experts, from the durations of recent calls. Sans-IO; times in seconds.

The run file sets the minimum. Slow or busy machines and lines need more: the limit is several times the median call,
and doubles after a round that timed out without enough answers.
Hostile input: the durations of calls. The median counts, so a few slow hosts do not raise the limit. If most hosts are
silent, the limit grows to at most `_IN_VAIN_MOST` times its normal value.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

from peerd.core.limits import RPC_DEADLINE_S

_TIMES: Final = 4.0  # times the median call
_AGAIN, _IN_VAIN_MOST = 2.0, 32.0  # times the limit that was too short; at most this many times the normal limit
_REMEMBERED: Final = 32  # calls
MOST_S: Final = RPC_DEADLINE_S  # no host works on a call for longer


class RoundLimit:
    """Time limit of one caller's rounds; forwards and backwards share it."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._last_s = 0.0  # median of the last round
        self._in_vain_s = 0.0

    @property
    def seconds(self) -> float:
        """The limit of the next round, in seconds."""
        usual_s = max(self._last_s, statistics.median(self._took) if self._took else 0.0)
        first_s = max(self._least_s, min(MOST_S, _TIMES * usual_s))
        again_s = min(_AGAIN * self._in_vain_s, _IN_VAIN_MOST * first_s, MOST_S)
        return max(first_s, again_s)

    @property
    def stretch(self) -> float:
        """Ratio of the limit to the minimum in the run file."""
        return self.seconds / self._least_s

    def ended(self, limit_s: float, took: Sequence[float], *, in_vain: bool) -> None:
        """Record the end of a round with this limit. `took`: seconds of each answer; `in_vain`: too few in time."""
        self._took += took
        if in_vain:
            self._in_vain_s = max(self._in_vain_s, limit_s)
        elif took:
            self._in_vain_s, self._last_s = 0.0, statistics.median(took)
