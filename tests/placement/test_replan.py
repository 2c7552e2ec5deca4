"""New placement of a running pipeline: the moves that are worth it, and no others."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from peerd.placement.problem import Network, PlacementProblem, PlanDevice, StageWork
from peerd.placement.replan import ReplanOptions, replanned, steady_s
from tests.kit.amount import some

NEAR, FAR = 1e9, 1e6  # bytes/s
OPTIONS = ReplanOptions(moving_s=20.0, step_s=60.0)


def two_places(rates: tuple[float, float] = (NEAR, FAR), speeds: tuple[float, ...] = (1e12,) * 4) -> PlacementProblem:
    """Two stages, and in each of two places two devices; gradients are what travels."""
    place = np.array([0, 0, 1, 1])
    same = place[:, None] == place[None, :]
    rate, delay = np.where(same, *rates), np.where(same, 0.001, 0.05)
    np.fill_diagonal(rate, np.inf)
    np.fill_diagonal(delay, 0.0)
    devices = tuple(PlanDevice(f"d{i}", speed) for i, speed in enumerate(speeds))
    stages = (StageWork(gradient=1e8, activation=1e4, flops=1e9), StageWork(1e8, 0.0, 1e9))
    return PlacementProblem(devices, Network(delay, rate), stages, microbatches=8)


def moved(stage_of: tuple[int, ...], moves: dict[int, int]) -> tuple[int, ...]:
    return tuple(moves.get(device, stage) for device, stage in enumerate(stage_of))


def test_peers_near_each_other_come_to_share_what_needs_bandwidth() -> None:
    problem, apart = two_places(), (0, 1, 0, 1)
    moves = replanned(problem, apart, set(), OPTIONS, Random(1))
    assert len(moves) == 2
    together = moved(apart, moves)
    assert together in ((0, 0, 1, 1), (1, 1, 0, 0))
    assert steady_s(problem, together) < 0.2 * steady_s(problem, apart)


def test_what_is_good_stays() -> None:
    assert replanned(two_places(), (0, 0, 1, 1), set(), OPTIONS, Random(1)) == {}
    assert replanned(two_places((NEAR, NEAR)), (0, 1, 0, 1), set(), OPTIONS, Random(1)) == {}


def test_devices_that_may_not_move_do_not() -> None:
    moves = replanned(two_places(), (0, 1, 0, 1), {0}, OPTIONS, Random(1))
    assert 0 not in moves
    assert replanned(two_places(), (0, 1, 0, 1), {0, 1}, OPTIONS, Random(1)).keys() <= {2, 3}
    assert replanned(two_places(), (0, 1, 0, 1), {0, 1, 2, 3}, OPTIONS, Random(1)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(6), 2))
def test_no_plan_leaves_a_stage_without_a_device_or_makes_steps_longer(seed: int) -> None:
    rng = Random(seed)
    for _ in range(10):
        count, stages = rng.randrange(3, 8), rng.randrange(2, 4)
        rate = np.array([[rng.choice([FAR, 1e8, NEAR]) for _ in range(count)] for _ in range(count)])
        delay = np.array([[rng.random() / 10 for _ in range(count)] for _ in range(count)])
        np.fill_diagonal(rate, np.inf)
        np.fill_diagonal(delay, 0.0)
        works = tuple(StageWork(rng.choice([1e6, 1e8]), 1e5, rng.choice([1e9, 4e9])) for _ in range(stages))
        devices = tuple(PlanDevice(str(i), rng.choice([1e12, 4e12])) for i in range(count))
        problem = PlacementProblem(devices, Network(delay, rate), works, 16)
        stage_of = (*range(stages), *(rng.randrange(stages) for _ in range(count - stages)))
        stays = {device for device in range(count) if rng.random() < 0.3}
        moves = replanned(problem, stage_of, stays, OPTIONS, rng)
        after = moved(stage_of, moves)
        assert set(after) == set(range(stages))
        assert not moves.keys() & stays
        assert steady_s(problem, after) <= steady_s(problem, stage_of)
