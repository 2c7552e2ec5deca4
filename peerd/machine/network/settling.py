"""A figure that settles: it approaches a new value within about a minute, and is shown in steps of a fifth.

So a fluctuating measurement stays at an average, and small changes do not cause new plans. Sans-IO; values are
positive.
"""

from __future__ import annotations

import math
from typing import Final

SETTLE_S: Final = 40.0  # time constant: after it the value has covered 63 % of the change, by ratio
STEP: Final = 1.2  # least ratio by which the shown value changes


class SettlingFigure:
    """One figure of one reporting peer. The first value counts at once."""

    __slots__ = ("_at", "_from", "_shown", "_to")

    def __init__(self, now: float, value: float) -> None:
        self._at, self._from, self._to, self._shown = now, value, value, value

    def note(self, now: float, value: float) -> None:
        """Record a new reported value."""
        self._from, self._at, self._to = self._value(now), now, value

    def _value(self, now: float) -> float:
        if self._from == self._to:
            return self._to
        part = -math.expm1(-max(0.0, now - self._at) / SETTLE_S)
        return math.exp(math.log(self._from) * (1 - part) + math.log(self._to) * part)

    def read(self, now: float) -> float:
        """The value to show now."""
        value = self._value(now)
        if not self._shown / STEP < value < self._shown * STEP:
            self._shown = value
        return self._shown
