"""Delivery rate of a path from samples: the third highest of the newest ones, and whether it still grows.

With the third highest, neither a lost packet nor the burst of bytes that had waited for it changes the estimate. A rate
whose last two samples exceed all earlier ones has not reached the path's limit. Sans-IO, bounded by the number of
samples.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_GREW: Final = 1.1  # ratio of the last two samples to the best earlier one that counts as growth
_GROWS_SAMPLES: Final = 2  # samples after such growth during which the rate counts as growing


class PathRate:
    """Samples of a path's rate in bytes/s, oldest first."""

    __slots__ = ("grew_ago", "rates")

    def __init__(self, samples: int) -> None:
        """`samples`: number of samples to keep."""
        self.rates: deque[float] = deque(maxlen=samples)
        self.grew_ago = 0  # samples since the rate grew

    def add(self, rate: float) -> None:
        self.rates.append(rate)
        *older, last, newest = (0.0, 0.0, *self.rates)
        grew = min(last, newest) > _GREW * max(older, default=0.0)
        self.grew_ago = 0 if grew else self.grew_ago + 1

    @property
    def grows(self) -> bool:
        """True until the path's limit is reached; also while there are few samples."""
        return self.grew_ago < _GROWS_SAMPLES

    @property
    def carried(self) -> float:
        """The third highest sample, or the lowest of fewer; 0 without samples."""
        return min(sorted(self.rates)[-3:], default=0.0)
