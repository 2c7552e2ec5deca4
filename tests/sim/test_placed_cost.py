"""Costs of placed routes: the paper's is the planner's for the planner's own routes; that of messages, by hand."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from peerd.placement.cost import CostKind
from peerd.placement.problem import Network, PlacementProblem, PlanDevice, StagePlacement, StageWork
from peerd.placement.starts import random_placement
from scripts.benchmarks._placed_cost import WorkBytes, paper_s, paths_s
from tests.worlds.machines.placements import arranged
from tests.worlds.roles.placed import PlacedRun

MICROBATCHES = 4


def network(seed: int, count: int) -> Network:
    """Symmetric links, no two alike."""
    rng = np.random.default_rng(seed)
    delay_s, rate = rng.random((count, count)), 1e3 * (0.1 + rng.random((count, count)))
    delay_s, rate = delay_s + delay_s.T, rate + rate.T
    np.fill_diagonal(delay_s, 0.0)
    np.fill_diagonal(rate, math.inf)
    return Network(delay_s, rate)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("stages", "pipelines"), [(2, 2), (3, 3), (5, 2)])
def test_the_papers_cost_of_matched_routes_is_the_planners(seed: int, stages: int, pipelines: int) -> None:
    count = stages * pipelines
    links, sizes = network(seed, count), (pipelines,) * stages
    devices = tuple(PlanDevice(str(device)) for device in range(count))
    work = (StageWork(gradient=700.0, activation=90.0),) * stages
    problem = PlacementProblem(devices, links, work, MICROBATCHES * pipelines, sizes)
    placement, cost = arranged(problem, random_placement(problem, Random(seed)), CostKind.LATENCY)
    sent = WorkBytes(90.0, MICROBATCHES, [700.0] * stages)
    assert paper_s(PlacedRun(links, placement), sent) == pytest.approx(cost.total_s)


def test_seconds_of_the_messages_of_three_stages() -> None:
    """Delays are powers of ten, so that each can be told in the sum; the rates are of bytes a second."""
    delay_s = np.array([[0, 1.0, 10.0], [100.0, 0, 1000.0], [10000.0, 0.1, 0]])
    rate = np.full((3, 3), 50.0)
    rate[1, 0] = 20.0
    placement = StagePlacement((0, 1, 2), (((0, 1),), ((1, 2),)))
    work = WorkBytes(activation=100.0, microbatches=MICROBATCHES, gradients=[7.0, 7.0, 7.0])
    first_s = 1.0 + 100 / 50 + 1000.0 + 100 / 50 + 0.1 + 100 / 50 + 100.0 + 100 / 20
    assert paths_s(PlacedRun(Network(delay_s, rate), placement), work) == pytest.approx(first_s + 3 * 100 / 20)


def test_averaging_counts_with_all_others_at_once_by_messages_and_in_turn_by_the_paper() -> None:
    links = network(3, 3)
    alone = PlacedRun(links, StagePlacement((0, 0, 0)))
    work = WorkBytes(activation=0.0, microbatches=1, gradients=[600.0])
    to_others = links.seconds(200.0)
    assert paths_s(alone, work) == pytest.approx(2 * to_others.max())
    assert paper_s(alone, work) == pytest.approx(2 * to_others.sum(1).max())
