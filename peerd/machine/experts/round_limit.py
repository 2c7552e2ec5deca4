"""Time that a round of calls to experts may take, by how long such calls took lately. Sans-IO; seconds of the caller's.

The run file says the least. Machines and lines that are slow, or busy with other things, take longer: a round may take
several times as long as calls take in the middle, and after a round in vain the next one may take twice as long.
Hostile input: how long hosts took. The middle one counts, so that few that are slow stretch nothing; where most are
silent, a round takes at most `_IN_VAIN_MOST` times what it would, and they rest meanwhile (`host_rests`).
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Final

from peerd.core.limits import RPC_DEADLINE_S

_TIMES: Final = 4.0  # as long as calls take in the middle
_AGAIN, _IN_VAIN_MOST = 2.0, 32.0  # times as long as in vain, up to so many times what it would be without that
_REMEMBERED: Final = 32  # calls
MOST_S: Final = RPC_DEADLINE_S  # no host works on a call for longer


class RoundLimit:
    """See the module's header. One object for all rounds of a caller: forwards and backwards take about as long."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._took: deque[float] = deque(maxlen=_REMEMBERED)
        self._last_s = 0.0  # the middle one of the last round
        self._in_vain_s = 0.0

    @property
    def seconds(self) -> float:
        """Seconds that the next round may take."""
        usual_s = max(self._last_s, statistics.median(self._took) if self._took else 0.0)
        first_s = max(self._least_s, min(MOST_S, _TIMES * usual_s))
        again_s = min(_AGAIN * self._in_vain_s, _IN_VAIN_MOST * first_s, MOST_S)
        return max(first_s, again_s)

    @property
    def stretch(self) -> float:
        """Ratio of that to what the run file says."""
        return self.seconds / self._least_s

    def ended(self, limit_s: float, took: Sequence[float], *, in_vain: bool) -> None:
        """A round is over that could take `limit_s`; answers `took` so long. `in_vain`: too few for lack of time."""
        self._took += took
        if in_vain:
            self._in_vain_s = max(self._in_vain_s, limit_s)
        elif took:
            self._in_vain_s, self._last_s = 0.0, statistics.median(took)
