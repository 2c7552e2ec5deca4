"""Pipelines on a network with a link for each pair: routes inside regions are faster than crossed ones, and exact."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from peerd.placement.problem import Network, StagePlacement
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.worlds.roles.placed import PlacedRun, placed_world, step_times
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.clock import run_virtual

REGION = np.array([0, 0, 1, 1])  # of four devices
STAGE_OF = (0, 1, 0, 1)
INSIDE = StagePlacement(STAGE_OF, (((0, 1), (2, 3)),))
CROSSED = StagePlacement(STAGE_OF, (((0, 3), (2, 1)),))


def two_regions() -> Network:
    """5 ms and 2 MB/s inside a region, 80 ms and 100 kB/s to the other."""
    same = REGION[:, None] == REGION
    delay_s, rate = np.where(same, 0.005, 0.08), np.where(same, 2e6, 1e5)
    np.fill_diagonal(delay_s, 0.0)
    np.fill_diagonal(rate, math.inf)
    return Network(delay_s, rate)


async def _train(placed: PlacedRun, roles: Roles, batches: Batches) -> list[float]:
    """Train to the end, compare with plain torch; returns the time of each step's end."""
    run = roles.run
    async with placed_world(placed, roles, 1) as world:
        times = await step_times(world, roles, STEPS)
        trainers = [role.status() for role in roles.of(TrainerRole)]
        assert [trainer["microbatches"]["lost"] for trainer in trainers] == [0, 0]
        assert [trainer["retries"] for trainer in trainers] == [0, 0]
        assert batches.faults(run.batch.target_samples // run.pipeline.microbatch) == []
        modules = [post.served.module for member in roles.of(StageRole) for post in member.posts]
        assert sorted(module.stage for module in modules) == [0, 0, 1, 1]
        assert differences(run, plain_torch(run, batches), modules) == []
    return times


@pytest.mark.slow
@pytest.mark.thorough
def test_routes_inside_regions_train_faster_than_crossed_ones_and_both_exactly(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run, tokens_per_s = run_file("sgd", "float64", write_texts(tmp_path)), {}
    for name, placement in (("inside", INSIDE), ("crossed", CROSSED)):
        batches, placed = Batches(), PlacedRun(two_regions(), placement)
        with pytest.MonkeyPatch.context() as patch:
            batches.watch(patch)
            times = run_virtual(_train, placed, Roles(run, tmp_path / name), batches, seed=1)
        tokens = (STEPS - 1) * run.batch.target_samples * run.model.context
        tokens_per_s[name] = tokens / (times[-1] - times[0])
    assert tokens_per_s["inside"] > 1.2 * tokens_per_s["crossed"], tokens_per_s
