"""Cost of a placement, in seconds a step, by one of two models.

LATENCY is the paper's (equations 2 to 4): all microbatches of a step go through as one wave, stage after stage, forward
and back, and then gradients are averaged; total = DataP + 2 PipeP, and the time of computing where speeds are known.
With as many microbatches as pipelines, each link carries one microbatch, as there.

STEADY is of a full pipeline, in which many microbatches are in flight: one microbatch's way there and back through the
slowest links and devices fills and drains it, and in between the busiest device or link sets the pace:
total = DataP + fill + busiest.

Within a stage the work is shared by speed. Between neighbouring stages the shares flow along a bottleneck matching. A
link counts with delay and rate averaged over both directions, but is busy as long as its slower direction is.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from peerd.machine.placement.problem import Matrix, PlacementProblem

DEAD_S: Final = 1e9  # stands for "impossible": large beyond any plan, small enough to tell two impossible ones apart
NO_LINK: Final = 0.5 * DEAD_S


class CostKind(StrEnum):
    """What a step's seconds are made of."""

    LATENCY = "latency"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """Seconds of a step, by part."""

    kind: CostKind
    data_parallel_s: float  # the slowest stage's averaging
    pipeline_s: float  # links, there and back: of the whole wave, or of one microbatch that fills the pipeline
    compute_s: float  # of the whole wave, or of one microbatch
    busiest_s: float = 0.0  # STEADY: the busiest device's or link's further microbatches
    moving_s: float = 0.0  # of devices that change their stage, spread over the steps that it is to last

    @property
    def total_s(self) -> float:
        return self.data_parallel_s + self.pipeline_s + self.compute_s + self.busiest_s + self.moving_s

    def real(self) -> PlacementCost:
        """The same with what is impossible told as infinite."""
        parts = (self.data_parallel_s, self.pipeline_s, self.compute_s, self.busiest_s)
        averaging_s, links_s, compute_s, busiest_s = (np.inf if part >= NO_LINK else part for part in parts)
        return PlacementCost(self.kind, averaging_s, links_s, compute_s, busiest_s, self.moving_s)


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Times of all pairs, [N, N]: 0 to oneself, `DEAD_S` of delay where there is no link."""

    delay_s: Matrix  # both directions averaged
    s_per_byte: Matrix  # likewise
    slower_s_per_byte: Matrix  # of the slower direction

    @classmethod
    def of(cls, problem: PlacementProblem) -> PairTimes:
        network = problem.network.both_ways()
        alone = np.eye(len(problem.devices), dtype=bool)
        dead = (network.rate == 0) & ~alone
        with np.errstate(divide="ignore"):
            per_byte = np.where(dead | alone, 0.0, 1 / network.rate)
            slower = np.minimum(problem.network.rate, problem.network.rate.T)
            slower_per_byte = np.where(dead | alone, 0.0, 1 / slower)
        delay_s = np.where(alone, 0.0, np.where(dead, DEAD_S, network.delay_s))
        return cls(delay_s, per_byte, slower_per_byte)


def twins_of(problem: PlacementProblem, links: PairTimes) -> list[int]:
    """The class of each device: of one class are those that any plan could exchange without a difference.

    They have one speed and memory, and the same links to everybody else. Known by a first one of each class.
    """
    first: dict[tuple[object, ...], list[int]] = {}
    classes = list(range(len(problem.devices)))
    for at, device in enumerate(problem.devices):
        rows = (links.delay_s[at], links.s_per_byte[at], links.slower_s_per_byte[at])
        # The row's values in order are the same for twins, wherever their own places are.
        alike = first.setdefault((device.speed, device.memory, *(np.sort(row).tobytes() for row in rows)), [])
        for other in alike:
            if all(_same_but_for(matrix, at, other) for matrix in (links.delay_s, links.s_per_byte)) and _same_but_for(
                links.slower_s_per_byte, at, other
            ):
                classes[at] = other
                break
        else:
            alike.append(at)
    return classes


def _same_but_for(matrix: Matrix, one: int, other: int) -> bool:
    differs = matrix[one] != matrix[other]
    differs[[one, other]] = False
    return not differs.any()
