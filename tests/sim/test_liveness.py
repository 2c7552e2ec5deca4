"""Bad luck without malice, in virtual time: a peer that stands still, paths that lead in one direction only or not at
all, disks that hang or are full. Two stages of three peers and two trainers go on.

Of peers and paths: three steps are made within half a minute, and all peers catch up once the network is mended. Of
disks: no half minute passes without a step or a reason in somebody's status.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import torch
import trio

from peerd.compute import checkpoint
from peerd.compute.frozen_state import FrozenState
from peerd.core.run.runfile import BatchSection, CheckpointSection, RunFile
from peerd.sim.clock import run_virtual
from peerd.sim.world import World
from roles.stage import StageRole
from tests.kit.amount import few, thorough
from tests.worlds.roles.virtualroles import PacedDevice, Roles, pipeline_world, virtual_run

T = TypeVar("T")
WITHIN_S, WATCHED_S, STILL_S = 30.0, 100.0, 20.0
MICROBATCH_S, SLOW_MICROBATCH_S = 0.1, 1.5  # of a stage's device; where disks fail, a step takes some seconds
TRAINERS = ("trainer0", "trainer1")
Trouble = Callable[[World, Roles], Awaitable[None]]

pytestmark = pytest.mark.slow


def run_of(folder: Path, delayed: bool = False) -> RunFile:
    run = virtual_run(
        folder,
        (4000,) * 10,
        stages=2,
        batch=BatchSection(target_samples=8),
        checkpoint=CheckpointSection(every_steps=2, keep=2),
    )
    return msgspec.structs.replace(run, optimizer=msgspec.structs.replace(run.optimizer, delayed=delayed))


def told(roles: Roles) -> dict[str, Any]:
    """Reasons for which roles wait, by the names of their peers."""
    return {name: why for name, role in sorted(roles.live.items()) if (why := role.status()["waits_for"])}


# --- peers and paths ----------------------------------------------------------------------------------------


def conductor(roles: Roles) -> str:
    return roles.conductors()[0]


def mate(roles: Roles) -> str:
    """A peer of the conductor's stage."""
    return next(name for name in roles.serving(0) if name != conductor(roles))


def member(roles: Roles) -> str:
    """A peer of the other stage."""
    return roles.serving(1)[0]


def trainer(roles: Roles) -> str:
    return TRAINERS[0]


async def averaging(world: World, roles: Roles, name: str) -> None:
    """Wait until this peer is in the middle of a round."""
    begun, of = trio.Event(), roles.live[name].post.orders
    average = of._average

    async def noting(*rest: Any) -> Any:
        begun.set()
        return await average(*rest)

    of._average = noting
    await begun.wait()
    of._average = average


async def preparing(world: World, roles: Roles, name: str) -> None:
    """Wait until a step is prepared."""
    closing = [role for role in roles.of(StageRole) if role.stage == 1]
    assert await world.until(lambda: any(r.post.serving.closing for r in closing), within_s=60, step_s=0.001)


def stands_still(who: Callable[[Roles], str], when: Callable[[World, Roles, str], Awaitable[None]]) -> Trouble:
    async def stall(world: World, roles: Roles) -> None:
        name = who(roles)
        await when(world, roles, name)
        world.net.stall(name)
        await trio.sleep(STILL_S)
        world.net.resume(name)

    return stall


def one_way(source: Callable[[Roles], str], target: Callable[[Roles], str]) -> Trouble:
    async def cut(world: World, roles: Roles) -> None:
        world.net.block(source(roles), target(roles), both=False)
        await trio.lowlevel.checkpoint()

    return cut


def cut_off(stage: int, count: int, both: bool) -> Trouble:
    """A trainer reaches the conductor, and not so many peers of a stage."""

    async def cut(world: World, roles: Roles) -> None:
        for peer in [name for name in roles.serving(stage) if name != conductor(roles)][:count]:
            world.net.block(trainer(roles), peer, both=both)
        await trio.lowlevel.checkpoint()

    return cut


TROUBLES: dict[str, Trouble] = {
    "the conductor stands still while all average": stands_still(conductor, averaging),
    "a trainer does not reach a stage peer": one_way(trainer, member),
    "a member stands still while it averages": stands_still(member, averaging),
    "the conductor stands still while a step is prepared": stands_still(conductor, preparing),
    "a member stands still while a step is prepared": stands_still(member, preparing),
    "a trainer stands still while a step is prepared": stands_still(trainer, preparing),
    "a stage peer does not reach a trainer": one_way(member, trainer),
    "stage-mates reach each other one way": one_way(member, lambda roles: roles.serving(1)[1]),
    "a stage-mate does not reach the conductor": one_way(mate, conductor),
    "the conductor does not reach a stage-mate": one_way(conductor, mate),
    "a member of another stage does not reach the conductor": one_way(member, conductor),
    "the conductor does not reach a member of another stage": one_way(conductor, member),
    "a peer does not reach one of the next stage": one_way(mate, member),
    "a peer does not reach one of the stage before": one_way(member, mate),
    **{
        f"a trainer is cut off from {count} of stage {stage}{' both ways' if both else ''}": cut_off(stage, count, both)
        for stage in (0, 1)
        for count in (1, 3)
        for both in (False, True)
    },
}


async def goes_on(roles: Roles, trouble: Trouble) -> None:
    async with pipeline_world(roles, 6, *TRAINERS) as world:
        async with trio.open_nursery() as nursery:
            target = max(roles.steps()) + 3
            nursery.start_soon(trouble, world, roles)
            on = await world.until(lambda: max(roles.steps()) >= target, within_s=WITHIN_S)
            assert on, f"{told(roles)}\n{roles.story()}"
        world.net.heal()
        target = max(roles.steps()) + 2
        assert await world.until(lambda: min(roles.steps()) >= target, within_s=60), f"{told(roles)}\n{roles.story()}"


DELAYED = [name for name in TROUBLES if "averag" in name or "mate" in name or " does not reach a " in name]
CASES = [(name, delayed) for name in TROUBLES for delayed in (False, True) if not delayed or name in DELAYED]


@pytest.mark.parametrize(("trouble", "delayed"), few(CASES, *CASES[0:4:2]))
def test_a_step_goes_on_within_half_a_minute(tmp_path: Path, trouble: str, delayed: bool) -> None:
    torch.set_num_threads(1)
    roles = Roles(run_of(tmp_path, delayed), tmp_path / "peers", partial(PacedDevice, MICROBATCH_S))
    run_virtual(goes_on, roles, TROUBLES[trouble], seed=1)


# --- disks --------------------------------------------------------------------------------------------------


async def watch(roles: Roles, fail: Callable[[], None], mend: Callable[[], None]) -> None:
    """No time longer than WITHIN_S passes without a step, or a reason in a peer's status."""
    async with pipeline_world(roles, 6, *TRAINERS) as world:
        until = trio.current_time() + WATCHED_S
        fail()
        try:
            newest, moved = max(roles.steps()), trio.current_time()
            while trio.current_time() < until:
                await world.until(lambda: False, within_s=0.5)
                if max(roles.steps()) > newest or told(roles):
                    newest, moved = max(roles.steps()), trio.current_time()
                assert trio.current_time() - moved <= WITHIN_S, f"no step and no reason\n{roles.story()}"
        finally:
            mend()


class Disk(PacedDevice):
    """A device for which writing takes for ever, once it hangs; other jobs go on."""

    hangs = False
    victims = 1
    mended = trio.Event()  # at the test's end: a commit under way is not broken off

    def __init__(self) -> None:
        super().__init__(SLOW_MICROBATCH_S)

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        if Disk.hangs and name == "write a checkpoint" and (self in Disk.hung or len(Disk.hung) < Disk.victims):
            Disk.hung.append(self)
            await Disk.mended.wait()
        return await super().run(job, name=name, cost_s=cost_s, urgent=urgent)

    hung: list[PacedDevice] = []  # noqa: RUF012 - of the test that runs now


@pytest.mark.parametrize("victims", [pytest.param(1, id="one"), thorough(6, id="all")])
@pytest.mark.thorough
def test_a_disk_hangs(tmp_path: Path, victims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    for name, value in (("hung", []), ("victims", victims), ("hangs", False), ("mended", trio.Event())):
        monkeypatch.setattr(Disk, name, value)
    roles = Roles(run_of(tmp_path), tmp_path / "peers", Disk)
    run_virtual(watch, roles, lambda: setattr(Disk, "hangs", True), lambda: Disk.mended.set(), seed=1)


@pytest.mark.parametrize("victims", [thorough(1, id="one"), thorough(6, id="all")])
def test_a_disk_is_full_in_mid_commit(tmp_path: Path, victims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    original, full, folders = checkpoint.write_state, list[bool](), set[Path]()

    def write_state(path: Path, state: FrozenState) -> bytes:
        if full and (path.parent in folders or len(folders) < victims):
            folders.add(path.parent)
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(path, state)

    monkeypatch.setattr(checkpoint, "write_state", write_state)
    roles = Roles(run_of(tmp_path), tmp_path / "peers", partial(PacedDevice, SLOW_MICROBATCH_S))
    run_virtual(watch, roles, lambda: full.append(True), lambda: None, seed=1)
    assert len(folders) == victims
