"""Devices without memory: swarms whose peers find none for a microbatch, or in the middle of a step, go on exactly."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from peerd.run.runfile import CheckpointSection, ModelSection
from roles.stage import StageRole
from tests.worlds.roles.chaos import in_no_thread
from tests.worlds.roles.history import Histories
from tests.worlds.roles.virtualroles import PacedDevice, Roles, pipeline_world, virtual_run
from tests.worlds.simulation.world import World

PEERS = 4

pytestmark = pytest.mark.slow


class Scene:
    """Four peers of two stages and a trainer; each step is watched."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.set_num_threads(1)
        monkeypatch.setattr(trio.to_thread, "run_sync", in_no_thread)
        self.histories = Histories()
        self.histories.watch(monkeypatch)
        run = virtual_run(
            folder,
            (40_000,),
            stages=2,
            model=ModelSection(d_model=8, heads=1, layers=2, context=8, dtype="float64"),
            checkpoint=CheckpointSection(every_steps=4, keep=2),
        )
        self.roles = Roles(run, folder / "peers", partial(PacedDevice, 0.1))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        async with pipeline_world(self.roles, PEERS, "trainer") as world:
            yield world
            assert not [fault for node in world.nodes.values() for fault in node.host.faults.places.values()]
            states = [post.state for role in self.roles.of(StageRole) for post in role.posts]
            assert len(states) == PEERS
            assert not self.histories.faults(run=self.roles.run, states=states)

    async def until(self, world: World, step: int) -> None:
        """Wait until all peers have made so many steps."""

        def on() -> bool:
            steps = self.roles.steps()
            return len(steps) == PEERS and min(steps) >= step

        assert await world.until(on, within_s=60), self.roles.story()

    def device(self, name: str) -> PacedDevice:
        device = self.roles.devices[name]
        assert isinstance(device, PacedDevice)
        return device

    def told(self, name: str, event: str) -> list[Any]:
        return [each for each in self.roles.logs[name].recent(500) if each["name"] == event]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def once(job: str, when: str) -> Callable[[str], str]:
    """No memory for the next job of that name, and for none after it."""
    left = [job]

    def fails(name: str) -> str:
        if name not in left:
            return ""
        left.remove(name)
        return when

    return fails


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_peer_whose_device_fails_in_a_step_begins_again_if_its_parameters_are_lost(
    scene: Scene, autojump_clock: MockClock, when: str
) -> None:
    async with scene.running() as world:
        scene.device("stage1").fails = once("step", when)
        await scene.until(world, max(scene.roles.steps()) + 4)
        failures = scene.told("stage1", "role.failed")
        assert len(failures) == (1 if when == "after" else 0), failures
        why = "lost its parameters: “step” failed in the middle: there is no memory"
        assert all(why in each["why"] for each in failures)


async def test_microbatches_go_elsewhere_while_a_device_has_no_memory_for_them(
    scene: Scene, autojump_clock: MockClock
) -> None:
    async with scene.running() as world:
        device = scene.device("stage1")
        device.fails = lambda job: "before" if job in ("forward", "backward") else ""
        await scene.until(world, max(scene.roles.steps()) + 4)
        assert len(scene.told("stage1", "stage.no_memory")) == 1
        device.fails = lambda job: ""
        serving = scene.roles.live["stage1"].posts[0].serving
        done = serving.samples
        assert await world.until(lambda: serving.samples > done, within_s=120), "it is tried again after a rest"
        assert not scene.told("stage1", "role.failed")


async def test_a_state_that_finds_no_memory_to_be_copied_costs_a_checkpoint_and_nothing_else(
    scene: Scene, autojump_clock: MockClock
) -> None:
    async with scene.running() as world:
        scene.device("stage1").fails = once("freeze the state to save it", "before")
        await scene.until(world, max(scene.roles.steps()) + 5)
        (missed,) = scene.told("stage1", "checkpoint.not_saved")
        assert missed["level"] == "warn"
        assert missed["reason"].startswith("there is no memory for the job “freeze the state to save it”")
        assert scene.told("stage1", "checkpoint.saved"), "the next one is tried again"
        assert not scene.told("stage1", "role.failed")
