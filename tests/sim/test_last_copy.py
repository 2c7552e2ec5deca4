"""A stage peer that leaves with a state that nobody else has, on a slow disk: it is saved, and it is its newest."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeVar

import pytest
import trio

from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.virtual_time import virtual
from tests.worlds.network.world import home_world
from tests.worlds.roles.training import pinned
from tests.worlds.roles.virtualroles import PacedDevice, Roles, virtual_run

T = TypeVar("T")
pytestmark = pytest.mark.slow
DISK_S = 20.0  # for a checkpoint


class OneSlowJob(PacedDevice):
    """A device on which one kind of job takes its time."""

    def __init__(self, slow: str, takes_s: float) -> None:
        super().__init__(0.05)
        self._slow, self._takes_s = slow, takes_s

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        return await super().run(job, name=name, cost_s=self._takes_s if name == self._slow else cost_s, urgent=urgent)


SLOW_DISK: Final = ("write a checkpoint", DISK_S)
STUCK: Final = ("freeze the state to save it", 1e6)


@asynccontextmanager
async def training(folder: Path, stages: tuple[int, ...], slow: tuple[str, float]) -> AsyncIterator[Roles]:
    """Peers that serve these stages on such devices, and a trainer; some steps are made."""
    roles = Roles(virtual_run(folder, (20000,), stages=2), folder / "peers", lambda: OneSlowJob(*slow))
    async with home_world(1) as world:
        for number, stage in enumerate(stages):
            await world.start(f"stage{number}", program=roles.program(StageRole, run=pinned(roles.run, stage)))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: bool(roles.steps()) and min(roles.steps()) >= 4, within_s=120), roles.story()
        yield roles


@pytest.mark.parametrize(("stages", "waits"), [((0, 1), True), ((0, 1, 1), False)])
@virtual
async def test_the_last_copy_of_a_state_is_saved_before_its_peer_leaves(
    tmp_path: Path, stages: tuple[int, ...], waits: bool
) -> None:
    async with training(tmp_path, stages, SLOW_DISK) as roles:
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
        assert any(one is not None for one in told) or not waits
        if waits:
            assert listed == {False}, "it is a member again, though it leaves"
            assert post.saving.positions[-1] == post.state.position
            assert f"saving step {post.step} of stage {post.stage}, which no other peer is known to have" in told
        await trio.sleep(5.0)
        assert post.step <= role.step
    print(f"{took_s:.1f} s")
    assert (took_s >= DISK_S) == waits
    assert took_s < 2 * DISK_S


@pytest.mark.thorough
@virtual
async def test_where_all_holders_of_a_state_leave_at_once_one_of_them_saves_it(tmp_path: Path) -> None:
    async with training(tmp_path, (0, 1, 1), SLOW_DISK) as roles:
        leaving, began = [roles.live[f"stage{number}"] for number in (1, 2)], trio.current_time()
        posts = [role.post for role in leaving]
        async with trio.open_nursery() as nursery:
            for role in leaving:
                nursery.start_soon(role.leave)
        newest = max(post.state.position for post in posts)
        assert [post for post in posts if newest in post.saving.positions], "nobody has saved the newest state"
        assert DISK_S <= trio.current_time() - began < 2 * DISK_S


@pytest.mark.thorough
@virtual
async def test_a_device_that_is_stuck_holds_nobody_up_for_ever(tmp_path: Path) -> None:
    async with training(tmp_path, (0, 1), STUCK) as roles:
        role, began = roles.live["stage1"], trio.current_time()
        await role.leave()
        assert role.unsaved is None
        assert trio.current_time() - began < 45.0
