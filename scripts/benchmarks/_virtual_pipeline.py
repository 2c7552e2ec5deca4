"""Pipelines of real roles in virtual time: simulated devices, stage peers on lines of their own, a node to join at."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from peerd.run.runfile import BatchSection, ModelSection, OptimizerSection, PipelineSection, RunFile
from roles.stage import StageRole
from tests.worlds.roles.inline_worker import InlineWorker
from tests.worlds.roles.virtualroles import Roles, virtual_run
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.simnet import SimLine
from tests.worlds.simulation.world import Node, World, WorldConfig

T = TypeVar("T")
FORWARD: Final = 1 / 3.5  # share of a microbatch's device time; the rest is the backward pass with recomputation


class LayerDevice(InlineWorker):
    """Simulated device with `microbatch_s` per microbatch, which the last stage spends in the backward call only."""

    def __init__(self, microbatch_s: float) -> None:
        super().__init__()
        self.microbatch_s, self.is_last = microbatch_s, False

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        share = {"forward": FORWARD, "backward": 1.0 if self.is_last else 1.0 - FORWARD}.get(name, 0.0)
        return await super().run(job, name=name, cost_s=cost_s + share * self.microbatch_s, urgent=urgent)


def small_run(
    folder: Path, name: str, stages: int, microbatches: int, width: int, context: int, samples: int = 1
) -> RunFile:
    """A run of a small model with steps of this size, on text written to `folder`."""
    return virtual_run(
        folder,
        (40_000,) * 4,
        run=name,
        model=ModelSection(d_model=width, heads=2, layers=stages, context=context),
        pipeline=PipelineSection(stages=stages, microbatch=samples),
        optimizer=OptimizerSection(name="sgd", lr=0.1),
        batch=BatchSection(target_samples=microbatches * samples),
    )


def in_virtual_time(simulate: Callable[..., Any], *arguments: Any, seed: int = 1) -> Any:
    """Run a simulation in virtual time, with a temporary folder as the last argument."""
    with tempfile.TemporaryDirectory(prefix="peerd-virtual-") as folder:
        return run_virtual(simulate, *arguments, Path(folder), seed=seed)


@asynccontextmanager
async def booted(
    seed: int = 1, line: SimLine | None = None, config: WorldConfig | None = None, program: Any = None
) -> AsyncIterator[World]:
    """A world with one node, `boot`, at which others join."""
    async with World(seed, program or swarm(), config or WorldConfig()).running() as world:
        boot = await world.start("boot", line=line)
        world.bootstrap.append(boot.full_addr)
        yield world


async def start_stage(
    world: World,
    run: RunFile,
    folder: Path,
    stage: int,
    device: LayerDevice,
    line: SimLine | None = None,
    name: str = "",
    network: Any = None,
) -> tuple[Roles, Node]:
    """Start a peer of `stage` that computes on `device`."""
    device.is_last = stage == run.pipeline.stages - 1
    own = msgspec.structs.replace(run, limits=msgspec.structs.replace(run.limits, stage=stage))
    opened = iter([device])  # the first worker that the role opens
    roles = Roles(own, folder, lambda: next(opened, None) or InlineWorker())
    return roles, await world.start(name or f"stage{stage}", line=line, program=roles.program(StageRole, network))
