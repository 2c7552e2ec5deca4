"""A figure that settles: what is told anew is approached within some ten seconds, and shown in steps of a fifth.

So a measurement that jumps to and fro stays in between, and whoever plans by it is not made to plan anew by every
tremor. Sans-IO; figures are above zero.
"""

from __future__ import annotations

import math
from typing import Final

SETTLE_S: Final = 40.0  # after so long, 63 % of the way, by ratio
STEP: Final = 1.2  # what is shown changes by so much or not at all


class SettlingFigure:
    """One figure of one teller. The first value counts at once."""

    __slots__ = ("_at", "_from", "_shown", "_to")

    def __init__(self, now: float, value: float) -> None:
        self._at, self._from, self._to, self._shown = now, value, value, value

    def note(self, now: float, value: float) -> None:
        """It was told to be `value`."""
        self._from, self._at, self._to = self._value(now), now, value

    def _value(self, now: float) -> float:
        if self._from == self._to:
            return self._to
        part = -math.expm1(-max(0.0, now - self._at) / SETTLE_S)
        return math.exp(math.log(self._from) * (1 - part) + math.log(self._to) * part)

    def read(self, now: float) -> float:
        """The figure to show now."""
        value = self._value(now)
        if not self._shown / STEP < value < self._shown * STEP:
            self._shown = value
        return self._shown
