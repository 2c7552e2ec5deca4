"""Search for the best placement: simulated annealing over swaps, from many starts, with a result at any time.

First a short run from each start along the tree of the fastest links, and from random ones; then alternately from the
best placement so far and from a new random start, many short runs and some long ones. The search depends only on the
random stream and the number of evaluations: a time limit stops it, and changes nothing before that. For a small problem
every placement is evaluated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

import numpy as np

from peerd.placement.cost import NO_LINK, CostKind, PlacementCost
from peerd.placement.layout import MoveCost, StageLayout
from peerd.placement.model import CostModel, Members
from peerd.placement.moves import Moves
from peerd.placement.problem import IDLE, NoPlacement, PlacementProblem, StagePlacement
from peerd.placement.starts import Stages, by_links, by_random, check_fits, fits

FIRST_RUN: Final = 150  # evaluations
RANDOM_STARTS: Final = 2
SAMPLED: Final = 20  # moves whose cost differences determine the first temperature
HOT: Final = 1.0  # first temperature, as a multiple of their median
COLD: Final = 1e-3  # last temperature, as a fraction of the first
ABOVE: Final = 1.2  # bar while enumerating, as a multiple of the best; covers what the search adds to the cost
WARM: Final = 0.2  # first temperature of a run from the best placement, as a fraction of the usual one


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Options of the search, which ends at the limit that is reached first."""

    kind: CostKind = CostKind.LATENCY
    evaluations: int | None = None  # moves tried
    limit_s: float | None = None  # by the clock passed to the search
    moving_s: float = 0.0  # time for each device that changes its stage
    horizon_steps: int = 1  # planned steps with a new placement, over which the moving time is spread
    enumerated: int = 10_000  # a problem with at most this many placements is enumerated instead of searched

    def __post_init__(self) -> None:
        """Raises ValueError for invalid limits."""
        if self.evaluations is None and self.limit_s is None:
            raise ValueError("a search needs a limit: evaluations or limit_s")
        if not (math.isfinite(self.moving_s) and self.moving_s >= 0) or self.horizon_steps < 1:
            raise ValueError("moving_s must be finite and >= 0, and horizon_steps at least 1")


@dataclass(frozen=True, slots=True)
class Plan:
    """The best placement found, its cost, and the history of the cost."""

    placement: StagePlacement
    cost: PlacementCost
    evaluations: int
    optimal: bool  # every placement was evaluated
    trace: tuple[tuple[float, float], ...]  # seconds since the start, cost in seconds a step


@dataclass(slots=True)
class _Progress:
    """The best placement so far, and the limits."""

    options: SearchOptions
    clock: Callable[[], float]
    began: float
    evaluations: int = 0
    cost_s: float = math.inf
    members: Stages = ()
    order: list[int] | None = None
    trace: list[tuple[float, float]] = field(default_factory=list)

    def over(self) -> bool:
        if self.options.evaluations is not None and self.evaluations >= self.options.evaluations:
            return True
        return self.options.limit_s is not None and self.clock() - self.began >= self.options.limit_s

    def see(self, layout: StageLayout) -> None:
        if layout.cost.total_s < self.cost_s:
            self.cost_s, self.members, self.order = layout.cost.total_s, tuple(layout.members), layout.order
            self.trace.append((self.clock() - self.began, self.cost_s))


def plan(
    problem: PlacementProblem,
    options: SearchOptions,
    rng: Random,
    clock: Callable[[], float],
    start: StagePlacement | None = None,
) -> Plan:
    """The best placement found within the limits. With a start and `moving_s`, stages keep their numbers.

    Raises NoPlacement if there is none. `clock` returns seconds; only differences count.
    """
    check_fits(problem)
    moving = None
    if start is not None and options.moving_s:
        moving = MoveCost(start.stage_of, options.moving_s / options.horizon_steps)
    model = CostModel(problem, options.kind, keep_order=moving is not None)
    progress = _Progress(options, clock, clock())
    optimal = count_bound(problem) <= min(options.enumerated, options.evaluations or options.enumerated)
    if optimal:
        optimal = _enumerate(model, moving, progress)
    if not optimal:
        _search(model, moving, progress, rng, start)
    if not progress.members:
        raise NoPlacement("no placement gives each stage a device with enough memory")
    best = StageLayout(model, progress.members, moving, progress.order)
    if best.cost.total_s >= NO_LINK:
        raise NoPlacement("no placement found in which all peers that must exchange data can reach each other")
    return Plan(placed(best), best.cost, progress.evaluations, optimal, tuple(progress.trace))


def _enumerate(model: CostModel, moving: MoveCost | None, progress: _Progress) -> bool:
    """Evaluate every placement; returns False if a limit was reached before the last."""
    layout: StageLayout | None = None
    classes = model.classes if moving is None else list(range(len(model.classes)))
    for members in all_placements(model.problem, classes, model.order_is_free):
        if progress.over():
            return False
        progress.evaluations += 1
        if layout is None:
            layout = StageLayout(model, members, moving)
            progress.see(layout)
            continue
        change = layout.changed(dict(enumerate(members)), layout.searched_s * ABOVE)
        if change is not None and change.cost.total_s < layout.cost.total_s:
            layout.take(change)
            progress.see(layout)
    return True


def _search(
    model: CostModel, moving: MoveCost | None, progress: _Progress, rng: Random, start: StagePlacement | None
) -> None:
    problem = model.problem
    starts = _starts(problem, model, rng, start)
    for at, members in enumerate(starts):
        layout = StageLayout(model, members, moving)
        progress.see(layout)
        if progress.over():
            break
        _anneal(layout, progress, rng, FIRST_RUN, 1.0 if at or start is None else WARM)
    for turn in itertools.count(1):
        if progress.over():
            break
        length = FIRST_RUN * _luby(turn)
        _anneal(StageLayout(model, progress.members, moving, progress.order), progress, rng, length, WARM)
        drawn = rng.random()
        members = rng.choice(starts) if drawn < 0.3 else by_random(problem, rng, some_idle=drawn < 0.65)
        _anneal(StageLayout(model, members, moving), progress, rng, length, 1.0)


def _luby(turn: int) -> int:
    """The sequence 1 1 2 1 1 2 4 1 1 2 ...: at any time about the same effort went into runs of each length."""
    size = turn.bit_length()
    return 1 << (size - 1) if turn == (1 << size) - 1 else _luby(turn - (1 << (size - 1)) + 1)


def _starts(problem: PlacementProblem, model: CostModel, rng: Random, start: StagePlacement | None) -> list[Stages]:
    starts = [
        *by_links(problem, model.links, rng),
        *(by_random(problem, rng, some_idle=at > 0) for at in range(RANDOM_STARTS)),
    ]
    if start is not None:
        starts.insert(0, tuple(start.members(stage) for stage in range(len(problem.stages))))
    return starts


def _anneal(layout: StageLayout, progress: _Progress, rng: Random, length: int, heat: float) -> None:
    """One annealing run. The cost limit of each move is drawn first, so that bad moves are rarely computed fully."""
    moves = Moves(layout, rng)
    first_s = heat * HOT * _typical_s(layout, moves)
    for at in range(length):
        if progress.over():
            return
        progress.evaluations += 1
        proposal = moves.draw()
        if proposal is None:
            continue
        temperature_s = first_s * COLD ** (at / length)
        bar_s = layout.searched_s - temperature_s * math.log(1.0 - rng.random())
        change = layout.changed(proposal, bar_s)
        if change is not None:
            layout.take(change)
            moves.follow()
            progress.see(layout)


def _typical_s(layout: StageLayout, moves: Moves) -> float:
    """Median cost difference of a move."""
    found = []
    for _ in range(SAMPLED):
        proposal = moves.draw()
        change = layout.changed(proposal, np.inf) if proposal is not None else None
        if change is not None and change.searched_s != layout.searched_s:
            found.append(abs(change.searched_s - layout.searched_s))
    found = [difference for difference in found if difference < NO_LINK]
    return float(np.median(found)) if found else 0.0


def placed(layout: StageLayout) -> StagePlacement:
    """The placement of a layout: stages numbered along the pipeline, with the partners between them."""
    along: list[Members] = [layout.members[stage] for stage in layout.order]
    stage_of = [IDLE] * len(layout.model.classes)
    for stage, members in enumerate(along):
        for device in members:
            stage_of[device] = stage
    follows = []
    for stage, (here, there) in enumerate(itertools.pairwise(along)):
        found = layout.model.matching(stage, here, there)
        follows.append(tuple((here[row], there[column]) for row, column in found.pairs))
    return StagePlacement(tuple(stage_of), tuple(follows))


def cost_of(problem: PlacementProblem, placement: StagePlacement, kind: CostKind = CostKind.LATENCY) -> PlacementCost:
    """Cost of a placement with its stages in their order, and neighbouring stages matched optimally."""
    members = [placement.members(stage) for stage in range(len(problem.stages))]
    return StageLayout(CostModel(problem, kind, keep_order=True), members).cost.real()


def count_bound(problem: PlacementProblem) -> int:
    """Upper bound of the number of placements, without enumerating them."""
    choices = len(problem.stages) + (problem.sizes is None or sum(problem.sizes) < len(problem.devices))
    return int(choices ** len(problem.devices))


def all_placements(problem: PlacementProblem, classes: list[int], order_is_free: bool) -> Iterator[Stages]:
    """Members of each stage, for each placement of a small problem, each once.

    `classes`: devices of one class are interchangeable; a later one's stage is not below an earlier one's. If the order
    of stages is free, stages are numbered by their first device.
    """
    count, stages = len(problem.devices), len(problem.stages)
    before = {
        device: max((d for d in range(device) if classes[d] == classes[device]), default=-1) for device in range(count)
    }
    stage_of: list[int] = []
    members: list[list[int]] = [[] for _ in range(stages)]

    def full(stage: int) -> bool:
        return problem.sizes is not None and len(members[stage]) >= problem.sizes[stage]

    def rest(opened: int) -> Iterator[Stages]:
        device = len(stage_of)
        if device == count:
            if all(members) and (problem.sizes is None or all(full(stage) for stage in range(stages))):
                yield tuple(tuple(of) for of in members)
            return
        least = stage_of[before[device]] if before[device] >= 0 else IDLE
        for stage in range(least, min(stages, opened + 1) if order_is_free else stages):
            if stage != IDLE and (full(stage) or not fits(problem, device, stage)):
                continue
            stage_of.append(stage)
            if stage != IDLE:
                members[stage].append(device)
            yield from rest(max(opened, stage + 1))
            stage_of.pop()
            if stage != IDLE:
                members[stage].pop()

    yield from rest(0)
