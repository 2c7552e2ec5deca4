"""Loads of a swarm's stage peers, and the resulting capacity of the stages.

`StageLoads` is a scratch copy of who serves which stage: rules try transfers on it. A stage's capacity is the sum of
its peers' rates, and a pipeline's is that of its weakest stage. A peer that moves takes its device along: its rate in
another stage follows from the cost of a microbatch there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_LAST: Final = "\U0010ffff"  # sorts after every name

PERIOD_S: Final = 60.0
_LEAST_WORK: Final = 4.0  # microbatches that a period must have, to give a meaningful rate
_APART_S: Final = 5.0  # between marks
_MARKS: Final = 128


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """Load of one stage peer over the last period."""

    peer: str
    stage: int
    rate: float  # microbatches per second of its stage, when it is never idle
    stays: bool = False  # it may not move now


@dataclass(frozen=True, slots=True)
class Transfer:
    """A peer's move from one stage to another."""

    peer: str
    source: int
    target: int


class StageLoads:
    """Who serves which stage. `work`: relative cost of a microbatch in each stage."""

    def __init__(self, loads: Iterable[PeerLoad], work: Sequence[float]) -> None:
        self.work = tuple(work)
        self.capacity = [0.0] * len(self.work)  # microbatches per second
        self.count = [0] * len(self.work)
        # Peers that may move, sorted by the speed of their devices, and the speed of each.
        self._movable: list[list[tuple[float, str]]] = [[] for _ in self.work]
        self._speeds: list[dict[str, float]] = [{} for _ in self.work]
        for load in sorted(loads, key=lambda one: one.peer):
            self.capacity[load.stage] += load.rate
            self.count[load.stage] += 1
            if not load.stays:
                self._speeds[load.stage][load.peer] = load.rate * self.work[load.stage]
        for movable, speeds in zip(self._movable, self._speeds, strict=True):
            movable += sorted((speed, peer) for peer, speed in speeds.items())

    @property
    def throughput(self) -> float:
        """Microbatches per second of the whole pipeline."""
        return min(self.capacity)

    def weakest(self) -> int:
        """The stage with the least capacity; among equal ones, the first."""
        return min(range(len(self.capacity)), key=lambda stage: (self.capacity[stage], stage))

    def rate_in(self, speed: float, stage: int) -> float:
        """The rate of a device of this speed in `stage`."""
        return speed / self.work[stage]

    def rate_of(self, one: Transfer) -> float:
        """The present rate of the peer that moves."""
        return self.rate_in(self._speeds[one.source][one.peer], one.source)

    def near(self, source: int, speed: float) -> Iterator[tuple[float, str]]:
        """Of the peers of `source` that may move: the fastest up to this speed, and the slowest above it."""
        movable = self._movable[source]
        above = bisect_right(movable, (speed, _LAST))
        if above:
            yield movable[bisect_left(movable, (movable[above - 1][0], ""))]  # the first of equal ones
        if above < len(movable):
            yield movable[above]

    def move(self, one: Transfer) -> None:
        """Apply a transfer; the peer does not move again."""
        speed = self._speeds[one.source].pop(one.peer)
        self._movable[one.source].remove((speed, one.peer))
        self.capacity[one.source] -= self.rate_in(speed, one.source)
        self.capacity[one.target] += self.rate_in(speed, one.target)
        self.count[one.source] -= 1
        self.count[one.target] += 1


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
    """Meter of a post's load over the last minute: its rate when never idle, its busy share, and its mean queue.

    A slow device finishes few microbatches in a minute, so the period is longer then. The caller passes the time.
    """

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
