"""New placement of a running pipeline: the moves that shorten its steps by more than the moves cost.

The search starts from the current placement; a move costs its time, spread over the steps until the horizon. Peers that
a plan would make idle stay where they are; the result is compared with a plan that keeps the stages' sizes. Of each
plan only the moves of movable devices count, and of these only those without which the result is worse. Nothing changes
for less than `least_gain` of a step's time.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from random import Random

from peerd.placement.cost import CostKind
from peerd.placement.problem import IDLE, NoPlacement, PlacementProblem, StagePlacement
from peerd.placement.search import SearchOptions, cost_of, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplanOptions:
    """`moving_s`: time of each move; `step_s`: current duration of a step; `horizon_s`: planned life of a placement."""

    moving_s: float
    step_s: float
    horizon_s: float = 1800.0
    least_gain: float = 0.1  # fraction of a step's time
    evaluations: int = 5_000  # a number instead of seconds, so that every machine gets the same result

    @property
    def search(self) -> SearchOptions:
        steps = max(1, round(self.horizon_s / max(self.step_s, 1e-3)))
        moving_s = max(self.moving_s, 1e-6)  # with 0 the search would renumber the stages
        return SearchOptions(
            kind=CostKind.STEADY,
            evaluations=self.evaluations,
            moving_s=moving_s,
            horizon_steps=steps,
        )


def steady_s(problem: PlacementProblem, stage_of: tuple[int, ...]) -> float:
    """Seconds of a step with this placement; infinite if peers that must exchange data cannot."""
    return cost_of(problem, StagePlacement(stage_of), CostKind.STEADY).total_s


def replanned(
    problem: PlacementProblem,
    stage_of: tuple[int, ...],
    stays: Set[int],
    options: ReplanOptions,
    rng: Random,
) -> dict[int, int]:
    """The new stage of each device that should move; empty if nothing is worth it. `stays`: immovable devices."""
    before_s, search = steady_s(problem, stage_of), options.search
    each_s = search.moving_s / search.horizon_steps
    best, least_s = dict[int, int](), (1.0 - options.least_gain) * before_s
    for given in (problem, replace(problem, sizes=_sizes(problem, stage_of))):  # the second has no idle devices
        try:
            found = plan(given, search, rng, lambda: 0.0, StagePlacement(stage_of)).placement.stage_of
        except NoPlacement:
            continue
        pairs = enumerate(zip(stage_of, found, strict=True))
        wanted = {device: new for device, (old, new) in pairs if new not in (old, IDLE) and device not in stays}
        moves = _needed(problem, stage_of, wanted)
        takes_s = steady_s(problem, _moved(stage_of, moves)) + len(moves) * each_s
        if moves and takes_s < least_s:
            best, least_s = moves, takes_s
    return best


def _sizes(problem: PlacementProblem, stage_of: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(stage_of.count(stage) for stage in range(len(problem.stages)))


def _needed(problem: PlacementProblem, stage_of: tuple[int, ...], moves: dict[int, int]) -> dict[int, int]:
    """`moves` without those that do not improve the result; empty if some stage would have no device."""
    least_s = steady_s(problem, _moved(stage_of, moves)) if _keeps_all(problem, stage_of, moves) else float("inf")
    for device in sorted(moves):
        fewer = {one: stage for one, stage in moves.items() if one != device}
        if not _keeps_all(problem, stage_of, fewer):
            continue
        without_s = steady_s(problem, _moved(stage_of, fewer))
        if without_s <= least_s:
            moves, least_s = fewer, without_s
    return moves if _keeps_all(problem, stage_of, moves) else {}


def _moved(stage_of: tuple[int, ...], moves: dict[int, int]) -> tuple[int, ...]:
    return tuple(moves.get(device, stage) for device, stage in enumerate(stage_of))


def _keeps_all(problem: PlacementProblem, stage_of: tuple[int, ...], moves: dict[int, int]) -> bool:
    """Return True if every stage has a device."""
    return set(range(len(problem.stages))) <= set(_moved(stage_of, moves))
