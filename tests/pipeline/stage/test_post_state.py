"""State of a post that is saved while a step is under way: each checkpoint has the state of the step in its name."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import msgspec
import numpy as np
import pytest
import torch
import trio
import trio.testing

from peerd.averaging.rounds.averaging_rounds import Total
from peerd.codec.tensors import state_digest
from peerd.core.errors import ConfigError
from peerd.log import EventLog
from peerd.messages.swarm import Position
from peerd.pipeline.stage.post_state import PostState
from peerd.role.role import RoleContext
from peerd.run.runfile import BatchSection, LimitsSection, ModelSection, PipelineSection, RunFile
from peerd.state.catchup import copy_room
from peerd.state.checkpoints.stage_checkpoints import StageCheckpoints
from peerd.state.state_room import StateRoom
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.simulation.clock import SimClock

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

    def __init__(self, folder: Path, run: RunFile = RUN) -> None:
        torch.set_num_threads(1)
        self.device = HeldWorker()
        ctx = SimpleNamespace(
            run=run,
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


@pytest.mark.parametrize("memory_gb", [0, 100])
async def test_a_checkpoint_that_the_next_step_overtakes_takes_no_memory_that_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_gb: float
) -> None:
    rooms = list[tuple[int, Path]]()

    def made(size: int, folder: Path, needs_file: bool = False) -> StateRoom:
        assert needs_file
        rooms.append((size, folder))
        return StateRoom(size, folder, needs_file)

    monkeypatch.setattr(copy_room, "StateRoom", made)
    scene = Scene(tmp_path, msgspec.structs.replace(RUN, limits=LimitsSection(memory_gb=memory_gb)))
    await scene.open()
    await scene.step(1)
    expected, size = scene.state.served.module.digest(), sum(t.nbytes for t in scene.state.model.state().values())
    await scene.state.save()
    await scene.step(2)
    assert rooms == ([(size, tmp_path)] if memory_gb else [])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.saving.run)
        await scene.saving.written()
        nursery.cancel_scope.cancel()
    (position,) = scene.saving.positions
    assert position.step == 1
    assert state_digest(await scene.saving.load(position)) == expected


async def test_a_checkpoint_without_room_for_its_copy_is_missed_with_a_reason_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(size: int, folder: Path, needs_file: bool = False) -> StateRoom:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(copy_room, "StateRoom", full)
    monkeypatch.setattr(copy_room, "spare_bytes", lambda run, size: 0)
    scene = Scene(tmp_path, msgspec.structs.replace(RUN, limits=LimitsSection(memory_gb=100)))
    await scene.open()
    await scene.step(1)
    await scene.state.save()
    await scene.step(2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.saving.run)
        await scene.saving.written()
        assert scene.saving.problem is not None
        assert scene.saving.problem.startswith("no checkpoint of step 1: ")
        assert scene.saving.problem.endswith(f"{tmp_path}: No space left on device")
        await scene.step(3)
        await scene.state.save()
        await scene.saving.written()
        nursery.cancel_scope.cancel()
    assert [position.step for position in scene.saving.positions] == [3]
    assert scene.saving.problem is None
