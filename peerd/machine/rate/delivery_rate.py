"""Delivery rate of a path, from samples of the rate at which bytes passed it: the third best of the newest, and whether
there is more to be had.

The third best: neither a lost packet nor a burst, when what had waited for one comes at once, is another path. A rate
that grows twice in a row beyond all before has not found its end. Sans-IO, bounded by the number of samples.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_GREW: Final = 1.1  # the last two over the best before: there is more to be had,
_GROWS_SAMPLES: Final = 2  # so long after that


class PathRate:
    """Samples of a path's rate in bytes/s, oldest first."""

    __slots__ = ("grew_ago", "rates")

    def __init__(self, samples: int) -> None:
        """Keep so many samples."""
        self.rates: deque[float] = deque(maxlen=samples)
        self.grew_ago = 0  # samples since the rate grew

    def add(self, rate: float) -> None:
        self.rates.append(rate)
        *older, last, newest = (0.0, 0.0, *self.rates)
        grew = min(last, newest) > _GREW * max(older, default=0.0)
        self.grew_ago = 0 if grew else self.grew_ago + 1

    @property
    def grows(self) -> bool:
        """True while the path's end was not met; as long as there are few samples, too."""
        return self.grew_ago < _GROWS_SAMPLES

    @property
    def carried(self) -> float:
        """The third best, or the least of fewer; 0 without any."""
        return min(sorted(self.rates)[-3:], default=0.0)
