"""Training under virtual time: peers vanish and others come, links stall, and all that live hold the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio

from peerd.core.run.runfile import BatchSection, CheckpointSection, OptimizerSection, RunFile
from peerd.sim.clock import run_virtual
from peerd.sim.world import World
from roles.stage import StageRole
from tests.kit.amount import thorough
from tests.worlds.roles.virtualroles import Roles, pipeline_world, virtual_run

STEPS = 30
TRAINERS = ("trainer0", "trainer1")


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return virtual_run(
        tmp_path,
        (4000,) * 10,
        stages=2,
        optimizer=OptimizerSection(name="adamw", lr=1e-3, total_steps=STEPS),
        batch=BatchSection(target_samples=8),
        checkpoint=CheckpointSection(every_steps=10, keep=2),
    )


Trouble = Callable[[World, Roles, random.Random], Any]


async def train(seed: int, roles: Roles, trouble: Trouble) -> str:
    """Six stage peers and two trainers finish the run while `trouble` goes on; returns the trace's hash."""
    async with pipeline_world(roles, 6, *TRAINERS, seed=seed) as world:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trouble, world, roles, world.rng("trouble"))
            done = await world.until(lambda: max(roles.steps(), default=0) >= STEPS, within_s=900, step_s=0.5)
            nursery.cancel_scope.cancel()
        world.net.heal()
        assert done, f"stalled at {roles.steps()}\n{roles.story()}"
        assert await world.until(lambda: min(roles.steps()) == STEPS, within_s=60), f"{roles.steps()}\n{roles.story()}"
        for stage in range(2):
            peers = [role for role in roles.of(StageRole) if role.stage == stage]
            assert peers
            assert len({role.position for role in peers}) == 1
            assert len({role.post.served.module.digest() for role in peers}) == 1
        for trainer in TRAINERS:
            assert roles.live[trainer].status()["microbatches"]["lost"] == 0, roles.story()
        return world.trace.hash()


async def killing(world: World, roles: Roles, rng: random.Random) -> None:
    """Every few seconds a stage peer vanishes, with or without its connections, and a new one comes."""
    number = 0
    while True:
        await trio.sleep(rng.uniform(2, 8))
        crowded = [node for node in world.living() if node.name in roles.live and spare(roles, roles.live[node.name])]
        if crowded:
            await world.kill(rng.choice(crowded), silent=rng.random() < 0.3)
            number += 1
            await world.start(f"stage-new{number}", program=roles.program(StageRole))


async def stalling(world: World, roles: Roles, rng: random.Random) -> None:
    """The conductor falls off the net for longer than anyone's patience, and comes back."""
    for _ in range(2):
        await trio.sleep(rng.uniform(2, 4))
        world.partition([world.nodes[roles.conductors()[0]]])
        await trio.sleep(45)
        world.net.heal()
        await trio.sleep(20)


def spare(roles: Roles, role: Any) -> bool:
    """A stage peer whose stage has two others with the newest state."""
    if not isinstance(role, StageRole):
        return False
    mates = [r.position.step for r in roles.of(StageRole) if r.stage == role.stage and r is not role]
    return mates.count(max(roles.steps())) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("trouble", [killing, thorough(stalling)])
@pytest.mark.parametrize("delayed", [False, thorough(True)])
@pytest.mark.thorough
def test_all_who_live_hold_the_same_bits_after_trouble(
    tmp_path: Path, run: RunFile, trouble: Trouble, seed: int, delayed: bool
) -> None:
    torch.set_num_threads(1)
    run = msgspec.structs.replace(run, optimizer=msgspec.structs.replace(run.optimizer, delayed=delayed))
    run_virtual(train, seed, Roles(run, tmp_path / "peers"), trouble, seed=seed)
