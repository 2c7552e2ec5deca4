"""A stage peer that leaves with a state that nobody else has, on a slow disk: it is saved, and it is its newest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import torch
import trio

from peerd.core.run.runfile import LimitsSection, RunFile
from peerd.sim.clock import run_virtual
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.worlds.network.world import home_world
from tests.worlds.roles.virtualroles import PacedDevice, Roles, virtual_run

T = TypeVar("T")
pytestmark = pytest.mark.slow
DISK_S = 20.0  # for a checkpoint


class SlowDisk(PacedDevice):
    """A device whose checkpoints take their time."""

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        cost_s = DISK_S if name == "write a checkpoint" else cost_s
        return await super().run(job, name=name, cost_s=cost_s, urgent=urgent)


def of_stage(run: RunFile, stage: int) -> RunFile:
    return msgspec.structs.replace(run, limits=LimitsSection(stage=stage))


async def leave(roles: Roles, stages: tuple[int, ...]) -> float:
    """Seconds that the last of the stage peers, which serve these stages, takes to leave."""
    async with home_world(1) as world:
        for number, stage in enumerate(stages):
            await world.start(f"stage{number}", program=roles.program(StageRole, run=of_stage(roles.run, stage)))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: bool(roles.steps()) and min(roles.steps()) >= 4, within_s=120), roles.story()
        role = roles.live[f"stage{len(stages) - 1}"]
        told, listed, began = set[str | None](), set[bool](), trio.current_time()
        own, conductor = role.post._ctx.host.id.text, roles.live["stage0"].post

        async def watch() -> None:
            while True:
                told.add(role.unsaved)
                await trio.sleep(0.5)
                if trio.current_time() > began + 10.0:
                    listed.add(own in {m.peer for m in conductor.members if m.stage == role.stage})

        post = role.post
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            await role.leave()
            nursery.cancel_scope.cancel()
        took_s = trio.current_time() - began
        alone = stages.count(stages[-1]) == 1
        assert any(one is not None for one in told) or not alone
        if alone:
            assert listed == {False}, "it is a member again, though it leaves"
            assert post.saving.positions[-1] == post.state.position
            assert f"saving step {post.step} of stage {post.stage}, which no other peer is known to have" in told
        await trio.sleep(5.0)
        assert post.step <= role.step
        return took_s


@pytest.mark.parametrize(("stages", "waits"), [((0, 1), True), ((0, 1, 1), False)])
def test_the_last_copy_of_a_state_is_saved_before_its_peer_leaves(
    tmp_path: Path, stages: tuple[int, ...], waits: bool
) -> None:
    torch.set_num_threads(1)
    roles = Roles(virtual_run(tmp_path, (20000,), stages=2), tmp_path / "peers", lambda: SlowDisk(0.05))
    took_s = run_virtual(leave, roles, stages, seed=1)
    print(f"{took_s:.1f} s")
    assert (took_s >= DISK_S) == waits
    assert took_s < 2 * DISK_S


class StuckDevice(PacedDevice):
    """A device that never copies its state."""

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        cost_s = 1e6 if name == "freeze the state to save it" else cost_s
        return await super().run(job, name=name, cost_s=cost_s, urgent=urgent)


async def leave_all_of_a_stage(roles: Roles) -> float:
    """Seconds that both peers of stage 1 take to leave at the same time; at least one has saved its state."""
    async with home_world(1) as world:
        for number, stage in enumerate((0, 1, 1)):
            await world.start(f"stage{number}", program=roles.program(StageRole, run=of_stage(roles.run, stage)))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: bool(roles.steps()) and min(roles.steps()) >= 4, within_s=120), roles.story()
        leaving, began = [roles.live[f"stage{number}"] for number in (1, 2)], trio.current_time()
        posts = [role.post for role in leaving]
        async with trio.open_nursery() as nursery:
            for role in leaving:
                nursery.start_soon(role.leave)
        newest = max(post.state.position for post in posts)
        assert [post for post in posts if newest in post.saving.positions], "nobody has saved the newest state"
        return trio.current_time() - began


@pytest.mark.thorough
def test_where_all_holders_of_a_state_leave_at_once_one_of_them_saves_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    roles = Roles(virtual_run(tmp_path, (20000,), stages=2), tmp_path / "peers", lambda: SlowDisk(0.05))
    took_s = run_virtual(leave_all_of_a_stage, roles, seed=1)
    assert DISK_S <= took_s < 2 * DISK_S


async def leave_a_stuck_device(roles: Roles) -> float:
    async with home_world(1) as world:
        for stage in (0, 1):
            await world.start(f"stage{stage}", program=roles.program(StageRole, run=of_stage(roles.run, stage)))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: bool(roles.steps()) and min(roles.steps()) >= 2, within_s=120), roles.story()
        role, began = roles.live["stage1"], trio.current_time()
        await role.leave()
        assert role.unsaved is None
        return trio.current_time() - began


@pytest.mark.thorough
def test_a_device_that_is_stuck_holds_nobody_up_for_ever(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    roles = Roles(virtual_run(tmp_path, (20000,), stages=2), tmp_path / "peers", lambda: StuckDevice(0.05))
    assert run_virtual(leave_a_stuck_device, roles, seed=1) < 45.0
