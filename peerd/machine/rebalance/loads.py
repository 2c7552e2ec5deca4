"""Loads of a swarm's stage peers, and the resulting capacity of the stages.

`StageLoads` is a scratch copy of who serves which stage: rules try transfers on it. A stage's capacity is the sum of
its peers' rates, and a pipeline's is that of its weakest stage. A peer that moves takes its device along: its rate in
another stage follows from the cost of a microbatch there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

_LAST: Final = "\U0010ffff"  # sorts after every name


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
