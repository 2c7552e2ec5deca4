"""Order of draws from several sources, such that at every moment each has had its share.

This is Tijdeman's answer to the chairman assignment problem (Discrete Mathematics 32, 1980): among those that may be
drawn, the one whose share would be exceeded first. After n draws a source of weight w was drawn n * w times, give or
take 1 - 1 / (2k - 2) for k sources, for ever. A start that is off by up to 1 / (2k - 2) lets peers begin at different
places of the order and keeps the distance below 1. It is all in whole numbers: nothing drifts, machines agree, and
the state is how often each source was drawn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import Final

_STARTS: Final = 1 << 16  # how finely the start is drawn


class Mixture:
    """An endless order of source numbers; `counts` says how often each was drawn; set it to go on from there."""

    def __init__(self, weights: Sequence[float], rng: random.Random) -> None:
        """`weights`: above 0, of any sum; taken as the decimals that they are written in. `rng` draws the start."""
        shares = [Fraction(repr(weight)) for weight in weights]
        scale = lcm(*(share.denominator for share in shares))
        parts = [int(share * scale) for share in shares]
        slack = max(1, 2 * len(parts) - 2)
        # In units so small that a draw, a share of one and the start are all whole numbers.
        self._shares = [part * slack * _STARTS for part in parts]
        self._one = sum(self._shares)
        self._slack = self._one // slack
        self._start = self._draw_start(rng)
        self.counts = [0] * len(parts)

    def draw(self) -> int:
        """The next source."""
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
        """Initial debt to each source before the first draw: of sum 0, small enough for the bound, not below a
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
