"""Order of draws from several sources in which every source has its share at any time.

This is Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980): of the sources that may
be drawn, it picks the one whose share would be exceeded first. After n draws, a source of weight w was drawn n * w
times, within 1 - 1 / (2k - 2) for k sources, at any n. A random start offset of up to 1 / (2k - 2) lets peers begin at
different points of the order, and keeps that error below 1. All arithmetic uses integers, so nothing drifts and
machines agree. The state is the number of draws from each source.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Final

_STARTS: Final = 1 << 16  # resolution of the random start


class Mixture:
    """An endless order of source numbers. `counts` is the number of draws from each; set it to resume from there."""

    def __init__(self, weights: Sequence[float], rng: random.Random) -> None:
        """`weights`: positive, of any sum, converted exactly from their decimal text. `rng` draws the start."""
        shares = [Fraction(repr(weight)) for weight in weights]
        scale = lcm(*(share.denominator for share in shares))
        parts = [int(share * scale) for share in shares]
        slack = max(1, 2 * len(parts) - 2)
        # In units small enough that a draw, a share of it and the start are all integers.
        self._shares = [part * slack * _STARTS for part in parts]
        self._one = sum(self._shares)
        self._slack = self._one // slack
        self._start = self._draw_start(rng)
        self.counts = [0] * len(parts)

    def draw(self) -> int:
        """The number of the next source."""
        number = sum(self.counts) + 1
        lead, best = Fraction(0), -1
        for source, (share, start, count) in enumerate(zip(self._shares, self._start, self.counts, strict=True)):
            owed = share * number + start - self._one * count
            if owed >= self._slack:
                due = Fraction(self._one * (count + 1) - self._slack - start, share)
                if best < 0 or due < lead:
                    lead, best = due, source
        self.counts[best] += 1
        return best

    def _draw_start(self, rng: random.Random) -> list[int]:
        """Random initial debt to each source: their sum is 0, each is within the bound, and none is below minus a
        share.
        """
        lowest = [-min(self._slack, share) for share in self._shares]
        start = [0] * len(self._shares)
        for left, right in zip(range(len(start)), range(1, len(start)), strict=False):
            least = max(lowest[left] - start[left], start[right] - self._slack)
            most = min(self._slack - start[left], start[right] - lowest[right])
            moved = rng.randint(least, most)
            start[left] += moved
            start[right] -= moved
        return start
