"""Small placement problems, drawn by number, and their costs from the definitions, by looking at everything."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from random import Random

import numpy as np

from peerd.placement.cost import CostKind, PlacementCost
from peerd.placement.layout import StageLayout
from peerd.placement.model import CostModel
from peerd.placement.problem import IDLE, Matrix, Network, PlacementProblem, PlanDevice, StagePlacement, StageWork
from peerd.placement.search import placed

Members = tuple[tuple[int, ...], ...]


def arranged(
    problem: PlacementProblem, placement: StagePlacement, kind: CostKind = CostKind.LATENCY
) -> tuple[StagePlacement, PlacementCost]:
    """The same stages in the best order (if it is free), with the partners between them, and the cost."""
    model = CostModel(problem, kind, keep_order=False)
    layout = StageLayout(model, [placement.members(stage) for stage in range(len(problem.stages))])
    return placed(layout), layout.cost.real()


def drawn_problem(number: int) -> PlacementProblem:
    """Up to 6 devices and 3 stages: alike or not, dead and asymmetric links, memory and sizes that matter or not."""
    rng = np.random.default_rng(number)
    stages = int(rng.integers(1, 4))
    count = int(rng.integers(stages, 7))
    place = rng.integers(0, 3, count)
    delay_s = rng.integers(1, 100, (count, count)) / 1e3 * (1 + 4 * (place[:, None] != place))
    rate = rng.choice([1e6, 1e7, 1e8], (count, count))
    if rng.random() < 0.5:
        delay_s, rate = (delay_s + delay_s.T) / 2, np.minimum(rate, rate.T)
    if rng.random() < 0.3:
        rate = np.where(rng.random((count, count)) < 0.1, 0.0, rate)
    np.fill_diagonal(delay_s, 0.0)
    np.fill_diagonal(rate, np.inf)
    devices = tuple(
        PlanDevice(
            f"d{device}",
            speed=float(rng.choice([1e9, 2e9, 4e9])) if number % 3 else np.inf,
            memory=float(rng.choice([1, 2, 3])) * 1e9 if number % 2 else np.inf,
        )
        for device in range(count)
    )
    work = [
        StageWork(
            gradient=float(rng.integers(1, 20)) * 1e6,
            activation=float(rng.integers(1, 10)) * 1e6,
            flops=float(rng.integers(0, 3)) * 1e9,
            memory=float(rng.choice([0, 1e9, 2e9])),
        )
        for _ in range(stages)
    ]
    if rng.random() < 0.5:
        work = work[:1] * stages
    sizes = (count // stages,) * stages if rng.random() < 0.3 else None
    return PlacementProblem(devices, Network(delay_s, rate), tuple(work), int(rng.integers(1, 9)), sizes)


def every_partition(problem: PlacementProblem) -> Iterator[Members]:
    """All ways to give devices a stage or none, each stage with as many as it is to have."""
    stages = range(len(problem.stages))
    for stage_of in itertools.product((IDLE, *stages), repeat=len(problem.devices)):
        members = tuple(tuple(d for d, at in enumerate(stage_of) if at == stage) for stage in stages)
        if all(members) and (problem.sizes is None or tuple(map(len, members)) == problem.sizes):
            yield members


class Definition:
    """The definition of a problem's costs; each stage and each pair of stages is worked out once."""

    def __init__(self, problem: PlacementProblem, kind: CostKind) -> None:
        self._problem, self._kind = problem, kind
        self._net = problem.network.both_ways()
        self._slower = np.minimum(problem.network.rate, problem.network.rate.T)
        known = [device.speed for device in problem.devices if np.isfinite(device.speed)]
        self._known = bool(known)
        self._speeds = [min(device.speed, max(known)) if known else 1.0 for device in problem.devices]
        self._stage, self._pair = functools.cache(self._stage_s), functools.cache(self._pair_s)

    def cost(self, members: Members, order: tuple[int, ...]) -> float:
        """Cost of stages in an order, infinite where it cannot be; matchings by `least_bottleneck`."""
        stages = [self._stage(stage, of) for stage, of in enumerate(members)]
        pairs = [self._pair(one, members[one], members[other]) for one, other in itertools.pairwise(order)]
        busy_s = max([busy for *_, busy in stages] + [busy for _, busy in pairs])
        averaging_s, computed_s = max(each for each, _, _ in stages), sum(each for _, each, _ in stages)
        return averaging_s + sum(passed for passed, _ in pairs) + computed_s + busy_s

    def _stage_s(self, stage: int, of: tuple[int, ...]) -> tuple[float, float, float]:
        """Seconds of averaging, of computing, and that a device is busy for longer than a microbatch."""
        problem, net, speeds = self._problem, self._net, self._speeds
        work, total = problem.stages[stage], sum(speeds[d] for d in of)
        if any(problem.devices[d].memory < work.memory for d in of):
            return np.inf, 0.0, 0.0
        averaging_s = busy_s = computed_s = 0.0
        for d in of:
            parts = [2 * _seconds(net.delay_s[d, e], net.rate[d, e], work.gradient / len(of)) for e in of if e != d]
            averaging_s = max(averaging_s, sum(parts))
        if self._known and self._kind is CostKind.LATENCY:
            computed_s = problem.microbatches * work.flops / total
        elif self._known:
            computed_s = max(work.flops / speeds[d] for d in of)
            for d in of:
                own = problem.microbatches * speeds[d] / total
                busy_s = max(busy_s, max(0.0, own - 1) * work.flops / speeds[d])
        return averaging_s, computed_s, busy_s

    def _pair_s(self, one: int, here: tuple[int, ...], there: tuple[int, ...]) -> tuple[float, float]:
        """Seconds that activations take from one stage to the next, and that a line is busy with all but the first."""
        problem, net, speeds, latency = self._problem, self._net, self._speeds, self._kind is CostKind.LATENCY
        size, busy_s = problem.stages[one].activation, 0.0
        shares = [np.array([speeds[d] for d in of]) / sum(speeds[d] for d in of) for of in (here, there)]
        load = problem.microbatches * np.maximum(shares[0][:, None], shares[1][None])
        times = np.empty((2, len(here), len(there)))
        for (i, d), (j, e) in itertools.product(enumerate(here), enumerate(there)):
            sent = size * load[i, j] if latency else size
            times[0, i, j] = 2 * _seconds(net.delay_s[d, e], net.rate[d, e], sent)
            times[1, i, j] = _seconds(0.0, self._slower[d, e], size * max(0.0, load[i, j] - 1))
        if self._kind is CostKind.STEADY:
            busy_s = least_bottleneck(times[1], *shares)
            times[0][times[1] > busy_s] = np.inf
        return least_bottleneck(times[0], *shares), busy_s


def _seconds(delay_s: float, rate: float, size: float) -> float:
    return float(delay_s + size / rate) if rate > 0 else np.inf


def least_bottleneck(costs: Matrix, supply: Matrix, demand: Matrix) -> float:
    """The least value below which shares can flow: by Gale's condition, looked up for every set of rows."""
    rows = range(len(supply))
    sets = [list(of) for size in range(1, len(rows) + 1) for of in itertools.combinations(rows, size)]
    due = [float(supply[of].sum()) - 1e-9 for of in sets]
    for value in np.unique(costs):
        allowed = costs <= value
        if all(least <= demand[allowed[of].any(axis=0)].sum() for of, least in zip(sets, due, strict=True)):
            return float(value)
    return np.inf


def best_by_definition(problem: PlacementProblem, kind: CostKind) -> float:
    """The least cost of all placements, infinite for none."""
    stages = len(problem.stages)
    orders = list(itertools.permutations(range(stages))) if problem.stages_alike else [tuple(range(stages))]
    definition, best = Definition(problem, kind), np.inf
    for members in every_partition(problem):
        if problem.stages_alike and [of[0] for of in members] != sorted(of[0] for of in members):
            continue
        best = min([best, *(definition.cost(members, order) for order in orders)])
    return best


def drawn_costs(rng: Random, rows: int, columns: int) -> Matrix:
    """Costs of which many are equal."""
    return np.array([[float(rng.randint(0, 9)) for _ in range(columns)] for _ in range(rows)])
