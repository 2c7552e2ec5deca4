"""Meter of a post's load over the last minute: its rate when never idle, its busy share, and its mean queue.

A slow device finishes few microbatches in a minute, so the period is longer then. The caller passes the time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

PERIOD_S: Final = 60.0
_LEAST_WORK: Final = 4.0  # microbatches that a period must have, to give a meaningful rate
_APART_S: Final = 5.0  # between marks
_MARKS: Final = 128


@dataclass(frozen=True, slots=True)
class MeterReading:
    """One reading: the load over the meter's last period."""

    rate: float  # microbatches per second; 0: unknown
    busy: float  # share of the time
    queue: float  # mean number of microbatches that waited


@dataclass(frozen=True, slots=True)
class _Mark:
    """Cumulative sums at one time."""

    at: float
    work: float
    busy_s: float
    present_s: float


class LoadMeter:
    """Load meter of one post. Microbatches that wait or are being computed count as present."""

    def __init__(self, now: float) -> None:
        self._work = self._busy_s = self._present_s = 0.0
        self._present, self._changed_at = 0, now
        self._marks = deque([_Mark(now, 0.0, 0.0, 0.0)], maxlen=_MARKS)

    def worked(self, microbatches: float, seconds: float) -> None:
        """Record that the device computed for `seconds` and finished this number of microbatches."""
        self._work += microbatches
        self._busy_s += seconds

    @property
    def present(self) -> int:
        """Number of microbatches that wait or are being computed now."""
        return self._present

    def came(self, now: float) -> None:
        """Record that one more microbatch is present."""
        self._pass(now)
        self._present += 1

    def went(self, now: float) -> None:
        """Record that one microbatch fewer is present."""
        self._pass(now)
        self._present -= 1

    def look(self, now: float) -> MeterReading:
        """The load of the last period, up to `now`."""
        self._pass(now)
        since = self._begin(now)
        if now - self._marks[-1].at >= _APART_S:
            self._marks.append(_Mark(now, self._work, self._busy_s, self._present_s))
        period_s = now - since.at
        if period_s <= 0.0:
            return MeterReading(0.0, 0.0, 0.0)
        work, busy_s = self._work - since.work, self._busy_s - since.busy_s
        busy = min(1.0, busy_s / period_s)
        queue = max(0.0, (self._present_s - since.present_s) / period_s - busy)
        return MeterReading(work / busy_s if work and busy_s > 0.0 else 0.0, busy, queue)

    def _pass(self, now: float) -> None:
        self._present_s += self._present * (now - self._changed_at)
        self._changed_at = now

    def _begin(self, now: float) -> _Mark:
        """The mark from which to measure: a period ago, or earlier if little was finished since."""
        for mark in reversed(self._marks):
            if now - mark.at >= PERIOD_S and self._work - mark.work >= _LEAST_WORK:
                return mark
        return self._marks[0]
