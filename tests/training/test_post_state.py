"""State of a post that is saved while a step is under way: each checkpoint has the state of the step in its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
import pytest
import torch
import trio
import trio.testing

from peerd.core.errors import ConfigError
from peerd.core.messages.swarm import Position
from peerd.core.run.runfile import BatchSection, ModelSection, PipelineSection, RunFile
from peerd.log import EventLog
from peerd.role import RoleContext
from peerd.sim.clock import SimClock
from peerd.training.checkpoints.stage_checkpoints import StageCheckpoints
from peerd.training.stage.averaging import Total
from peerd.training.stage.post_state import PostState
from tests.worlds.machines.workers import InlineWorker

pytestmark = pytest.mark.no_watchdog("jobs of the model run on the loop, for their order")
T = TypeVar("T")
RUN = RunFile(
    run="x",
    seed=5,
    model=ModelSection(d_model=16, heads=2, layers=2, context=8),
    pipeline=PipelineSection(stages=1, microbatch=2),
    batch=BatchSection(target_samples=8),
)
LINEAGE = b"l"


class HeldWorker(InlineWorker):
    """A device whose jobs of the name `holds` wait until `lets_go` is set."""

    def __init__(self) -> None:
        self.holds, self.held, self.lets_go = "", trio.Event(), trio.Event()

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        if name == self.holds:
            self.held.set()
            await self.lets_go.wait()
        return await super().run(job, name=name, cost_s=cost_s, urgent=urgent)


class Scene:
    """One post's state, its checkpoints, and the device that it is on."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.device = HeldWorker()
        ctx = SimpleNamespace(
            run=RUN,
            device="cpu",
            worker=lambda name: self.device,
            data_dir=folder,
            log=EventLog(SimClock(1, "peer")),
        )
        self.saving = StageCheckpoints(cast(RoleContext, ctx), b"f" * 16)
        self.state = PostState(cast(RoleContext, ctx), 0, self.saving)

    async def open(self) -> None:
        await self.state.build()
        await self.state.return_to_checkpoint()

    async def step(self, step: int) -> None:
        """Commit a step, as `PostOrders` does."""
        spec = self.state.model.vector_outline()

        async def how(target: Position) -> None:
            await self.state.step(target, Total(np.ones(spec.shape, spec.dtype), lambda: None))
            await self.state.has_diverged(target)
            self.state.arrive(target)

        await self.state.move(Position(step, LINEAGE), how)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_state_that_is_saved_behind_a_step_has_that_steps_name(scene: Scene) -> None:
    await scene.open()
    await scene.step(1)
    scene.device.holds = "look whether the parameters are finite"  # they are a step ahead of the position by then
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.saving.run)
        async with trio.open_nursery() as both:
            both.start_soon(scene.step, 2)
            await scene.device.held.wait()
            both.start_soon(scene.state.save)
            await trio.testing.wait_all_tasks_blocked()
            scene.device.lets_go.set()
        await scene.saving.written()
        nursery.cancel_scope.cancel()
    (position,) = scene.saving.positions
    assert int((await scene.saving.load(position))["step"]) == position.step == 2


async def test_a_checkpoint_that_holds_another_step_than_it_says_is_refused(scene: Scene) -> None:
    await scene.open()
    await scene.step(1)
    wrong = Position(7, LINEAGE)
    await scene.saving.save(wrong, scene.state.model.state())
    with pytest.raises(ConfigError, match=r"step 7 in .* holds the state of step 1; delete step-00000007\.json"):
        await scene.state.load_saved(wrong)
    assert (scene.state.position.step, scene.state.served.module.step) == (1, 1)
