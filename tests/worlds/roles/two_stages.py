"""Two stages of two peers each and a trainer, of real roles in virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from peerd.run.runfile import BatchSection, ModelSection, PipelineSection, RunFile
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.runs import changed
from tests.worlds.roles.virtualroles import Roles, virtual_run
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.simnet import SimLine
from tests.worlds.simulation.world import World, WorldConfig

MICROBATCH_S: Final = 0.05  # of a device
STAGES: Final = {"a0": 0, "b0": 0, "a1": 1, "b1": 1}  # of each stage peer


def two_stage_run(folder: Path) -> RunFile:
    """Its run file; texts are made in `folder`."""
    return virtual_run(
        folder,
        (40_000,) * 10,
        model=ModelSection(d_model=8, heads=1, layers=2, context=8),
        pipeline=PipelineSection(stages=2, microbatch=1),
        batch=BatchSection(target_samples=16),
    )


@asynccontextmanager
async def two_stages(roles: Roles, peers: Iterable[str] = tuple(STAGES)) -> AsyncIterator[World]:
    """The world in which these stage peers and the trainer are started, 20 ms from each other, on lines of 100 Mb/s."""
    config = WorldConfig(line=lambda rng: SimLine(latency_s=0.01, up_mbit_s=100, down_mbit_s=100))
    async with World(1, swarm(), config).running() as world:
        boot = await world.start("boot")
        world.bootstrap.append(boot.full_addr)
        for name in peers:
            own = changed(roles.run, limits={"stage": STAGES[name]})
            await world.start(name, program=roles.program(StageRole, run=own))
        await world.start("trainer", program=roles.program(TrainerRole))
        yield world
