"""Plans: optimal where all placements can be looked at, the same by the same seed, and kept within their limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from peerd.placement.cost import CostKind
from peerd.placement.problem import IDLE, Network, NoPlacement, PlacementProblem, PlanDevice, StagePlacement, StageWork
from peerd.placement.search import Plan, SearchOptions, cost_of, plan
from peerd.placement.starts import random_placement
from tests.kit.amount import some
from tests.worlds.machines.placements import Definition, arranged, best_by_definition, drawn_problem


def planned(problem: PlacementProblem, seed: int = 0, start: StagePlacement | None = None, **options: object) -> Plan:
    given = {"evaluations": 2000} | options
    return plan(problem, SearchOptions(**given), Random(seed), lambda: 0.0, start)  # type: ignore[arg-type]


def two_regions(gradient: float, activation: float) -> PlacementProblem:
    """Devices 0 to 3 and 4 to 7 near each other, and a slow line between."""
    near = np.arange(8)[:, None] // 4 == np.arange(8)[None] // 4
    delay_s, rate = np.where(near, 0.001, 0.1), np.where(near, 1e9, 1e7)
    np.fill_diagonal(delay_s, 0.0)
    work = StageWork(gradient, activation)
    devices = tuple(PlanDevice(f"d{at}") for at in range(8))
    return PlacementProblem(devices, Network(delay_s, rate), (work, work), 4, (4, 4))


def ticking() -> Callable[[], float]:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    return clock


@pytest.mark.slow
@pytest.mark.parametrize("number", some(range(500), 30))
def test_a_small_plan_is_optimal_by_the_definition_of_its_cost(number: int) -> None:
    problem, kind = drawn_problem(number), list(CostKind)[number // 2 % 2]
    best = best_by_definition(problem, kind)
    if not np.isfinite(best):
        with pytest.raises(NoPlacement):
            planned(problem, enumerated=10_000, evaluations=10_000, kind=kind)
        return
    found = planned(problem, enumerated=10_000, evaluations=10_000, kind=kind)
    assert found.optimal
    assert found.cost.total_s == pytest.approx(best)
    members = tuple(found.placement.members(stage) for stage in range(len(problem.stages)))
    order = tuple(range(len(problem.stages)))
    assert Definition(problem, kind).cost(members, order) == pytest.approx(best)
    assert cost_of(problem, found.placement, kind).total_s == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("number", some(range(50), 6))
def test_the_search_itself_finds_what_looking_at_everything_finds(number: int) -> None:
    problem, kind = drawn_problem(number), list(CostKind)[number // 2 % 2]
    if not np.isfinite(best_by_definition(problem, kind)):
        return
    every = planned(problem, enumerated=10_000, evaluations=10_000, kind=kind)
    searched = planned(problem, enumerated=0, evaluations=10_000, kind=kind)
    assert not searched.optimal
    assert searched.cost.total_s == pytest.approx(every.cost.total_s)


def test_the_same_seed_gives_the_same_plan_and_another_limit_the_same_beginning() -> None:
    problem = dataclasses.replace(two_regions(1e8, 1e8), sizes=None, microbatches=8)
    one, other = planned(problem, 3, enumerated=0), planned(problem, 3, enumerated=0)
    assert one == other
    assert one.evaluations == 2000
    shorter = planned(problem, 3, enumerated=0, evaluations=500)
    assert shorter.trace == one.trace[: len(shorter.trace)]
    assert planned(problem, 4, enumerated=0).trace != one.trace


def test_a_time_limit_cuts_the_search_and_changes_nothing_before() -> None:
    problem = dataclasses.replace(two_regions(1e8, 1e8), sizes=None, microbatches=8)
    cut = plan(problem, SearchOptions(limit_s=300.0, enumerated=0), Random(3), ticking())
    assert cut.trace[-1][0] <= 300
    whole = planned(problem, 3, enumerated=0)
    assert [cost for _, cost in cut.trace] == [cost for _, cost in whole.trace][: len(cut.trace)]
    costs = [cost for _, cost in whole.trace]
    assert costs == sorted(costs, reverse=True)
    assert whole.cost.total_s == pytest.approx(costs[-1])


def test_heavy_gradients_keep_a_stage_in_its_region_and_heavy_activations_a_pipeline() -> None:
    gradients = planned(two_regions(1e9, 1e3), enumerated=0)
    assert {gradients.placement.members(stage) for stage in (0, 1)} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    activations = planned(two_regions(1e3, 1e9), enumerated=0)
    for stage in (0, 1):
        assert sum(device < 4 for device in activations.placement.members(stage)) == 2
    for one, other in activations.placement.follows[0]:
        assert (one < 4) == (other < 4)


def test_one_device_serves_the_one_stage() -> None:
    alone = Network(np.zeros((1, 1)), np.full((1, 1), np.inf))
    found = planned(PlacementProblem((PlanDevice("d"),), alone, (StageWork(1e9, 0.0, 4e9),)))
    assert found.placement == StagePlacement((0,))
    assert found.cost.total_s == 0.0
    timed = PlacementProblem((PlanDevice("d", speed=1e9),), alone, (StageWork(1e9, 0.0, 4e9),), 3)
    for kind in CostKind:
        assert planned(timed, kind=kind).cost.total_s == pytest.approx(12.0)


def test_a_device_that_nobody_reaches_stays_idle() -> None:
    problem = dataclasses.replace(two_regions(1e6, 1e6), sizes=None)
    rate = problem.network.rate.copy()
    rate[:7, 7] = 0.0  # one direction is enough
    found = planned(dataclasses.replace(problem, network=Network(problem.network.delay_s, rate)), enumerated=0)
    assert found.placement.stage_of[7] == IDLE
    assert np.isfinite(found.cost.total_s)


def test_moving_is_worth_it_only_when_the_gain_outlasts_it() -> None:
    problem = two_regions(1e9, 1e3)
    start = StagePlacement((0, 1) * 4)
    stays = planned(problem, start=start, moving_s=1e6, horizon_steps=1, enumerated=0)
    assert stays.placement.stage_of == start.stage_of
    assert stays.cost.moving_s == 0.0
    goes = planned(problem, start=start, moving_s=1.0, horizon_steps=1000, enumerated=0)
    moved = sum(one != other for one, other in zip(goes.placement.stage_of, start.stage_of, strict=True))
    assert moved == 4  # stages keep their numbers: half of the devices are where they are to be
    assert goes.cost.moving_s == pytest.approx(4 * 1.0 / 1000)
    assert goes.cost.total_s < cost_of(problem, start).total_s


@pytest.mark.slow
def test_a_plan_is_better_than_random_ones_and_says_who_follows_whom() -> None:
    rng = np.random.default_rng(7)
    delay_s = rng.random((24, 24)) / 10
    np.fill_diagonal(delay_s, 0.0)
    devices = tuple(PlanDevice(f"d{at}", speed=float(rng.choice([1e9, 3e9]))) for at in range(24))
    network = Network(delay_s, rng.uniform(1e6, 1e8, (24, 24)))
    problem = PlacementProblem(devices, network, (StageWork(1e7, 1e6, 1e8),) * 5, 30)
    for kind in CostKind:
        found = planned(problem, kind=kind, evaluations=600)
        drawn = Random(1)
        costs = [arranged(problem, random_placement(problem, drawn), kind)[1].total_s for _ in range(5)]
        assert found.cost.total_s < min(costs)
        for stage, pairs in enumerate(found.placement.follows):
            assert {one for one, _ in pairs} == set(found.placement.members(stage))
            assert {other for _, other in pairs} == set(found.placement.members(stage + 1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sizes": (5, 4)}, "8 devices are too few for 9 places in 2 stages"),
        ({"stages": (StageWork(1.0, 1.0, memory=2e9), StageWork(1.0, 1.0))}, "0 of 8 devices have that much"),
    ],
)
def test_what_cannot_be_placed_is_told(change: dict[str, object], why: str) -> None:
    problem = two_regions(1.0, 1.0)
    poor = tuple(dataclasses.replace(device, memory=1e9) for device in problem.devices)
    with pytest.raises(NoPlacement, match=why):
        planned(dataclasses.replace(problem, devices=poor, **change))  # type: ignore[arg-type]


def test_where_nobody_reaches_anybody_there_is_no_placement() -> None:
    problem = two_regions(1.0, 1.0)
    cut = Network(problem.network.delay_s, np.where(np.eye(8, dtype=bool), np.inf, 0.0))
    with pytest.raises(NoPlacement, match="can reach each other"):
        planned(dataclasses.replace(problem, network=cut))


@pytest.mark.parametrize("options", [{}, {"evaluations": 1, "moving_s": -1.0}, {"evaluations": 1, "horizon_steps": 0}])
def test_a_search_without_a_limit_or_with_senseless_moving_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        SearchOptions(**options)  # type: ignore[arg-type]
