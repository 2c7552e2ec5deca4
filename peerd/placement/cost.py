"""Cost of a placement, in seconds per step, by one of two models.

LATENCY is that of DT-FM (Yuan et al. 2022, equations 2 to 4): all microbatches of a step pass as one wave, stage after
stage, forward and back, and then gradients are averaged; total = DataP + 2 PipeP, plus the computing time if speeds are
known. With as many microbatches as pipelines, each link carries one microbatch, as in the paper.

STEADY describes a full pipeline with many microbatches in flight: the pass of one microbatch there and back over the
slowest links and devices fills and drains it, and in between the busiest device or link determines the pace: total =
DataP + fill + busiest.

Within a stage the work is shared by speed. Between neighbouring stages the shares flow along a bottleneck matching. A
link's delay and rate are averaged over both directions, but its busy time is that of its slower direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from peerd.placement.problem import Matrix, PlacementProblem

DEAD_S: Final = 1e9  # "impossible": larger than any plan, but small enough that sums of it still differ
NO_LINK: Final = 0.5 * DEAD_S


class CostKind(StrEnum):
    """The model of a step's duration."""

    LATENCY = "latency"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """Seconds of a step, by part."""

    kind: CostKind
    data_parallel_s: float  # the slowest stage's averaging
    pipeline_s: float  # links, there and back, for the whole wave (LATENCY) or one microbatch (STEADY)
    compute_s: float  # for the whole wave (LATENCY) or one microbatch (STEADY)
    busiest_s: float = 0.0  # STEADY: time of the busiest device or link for the other microbatches
    moving_s: float = 0.0  # time of devices that change their stage, spread over the planned steps

    @property
    def total_s(self) -> float:
        return self.data_parallel_s + self.pipeline_s + self.compute_s + self.busiest_s + self.moving_s

    def real(self) -> PlacementCost:
        """The same cost with infinity for impossible parts."""
        parts = (self.data_parallel_s, self.pipeline_s, self.compute_s, self.busiest_s)
        averaging_s, links_s, compute_s, busiest_s = (np.inf if part >= NO_LINK else part for part in parts)
        return PlacementCost(self.kind, averaging_s, links_s, compute_s, busiest_s, self.moving_s)


@dataclass(frozen=True, slots=True)
class PairTimes:
    """Times of all pairs, [N, N]: 0 on the diagonal, a delay of `DEAD_S` if there is no link."""

    delay_s: Matrix  # averaged over both directions
    s_per_byte: Matrix  # of the average rate of both directions
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
    """The class of each device. Devices of one class can be exchanged in any plan without a difference.

    They have the same speed and memory, and the same links to all others. A class is identified by its first device.
    """
    first: dict[tuple[object, ...], list[int]] = {}
    classes = list(range(len(problem.devices)))
    for at, device in enumerate(problem.devices):
        rows = (links.delay_s[at], links.s_per_byte[at], links.slower_s_per_byte[at])
        # Twins have the same sorted row values, at any positions.
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
