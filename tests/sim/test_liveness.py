"""Bad luck without malice, in virtual time: a peer that stands still, paths that lead in one direction only or not at
all. Two stages of three peers and two trainers make three steps within half a minute, and all peers catch up once the
network is mended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.run.runfile import BatchSection, CheckpointSection, RunFile
from roles.stage import StageRole
from tests.kit.amount import few
from tests.kit.runs import changed
from tests.kit.virtual_time import virtual
from tests.worlds.roles.virtualroles import PacedDevice, Roles, pipeline_world, virtual_run
from tests.worlds.simulation.world import World

WITHIN_S, STILL_S = 30.0, 20.0
MICROBATCH_S = 0.1  # of a stage's device
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
    return changed(run, optimizer={"delayed": delayed})


def told(roles: Roles) -> dict[str, Any]:
    """Reasons for which roles wait, by the names of their peers."""
    return {name: why for name, role in sorted(roles.live.items()) if (why := role.status()["waits_for"])}


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


DELAYED = [name for name in TROUBLES if "averag" in name or "mate" in name or " does not reach a " in name]
CASES = [(name, delayed) for name in TROUBLES for delayed in (False, True) if not delayed or name in DELAYED]


@pytest.mark.parametrize(("trouble", "delayed"), few(CASES, *CASES[0:4:2]))
@virtual
async def test_a_step_goes_on_within_half_a_minute(tmp_path: Path, trouble: str, delayed: bool) -> None:
    roles = Roles(run_of(tmp_path, delayed), tmp_path / "peers", partial(PacedDevice, MICROBATCH_S))
    async with pipeline_world(roles, 6, *TRAINERS) as world:
        async with trio.open_nursery() as nursery:
            target = max(roles.steps()) + 3
            nursery.start_soon(TROUBLES[trouble], world, roles)
            on = await world.until(lambda: max(roles.steps()) >= target, within_s=WITHIN_S)
            assert on, f"{told(roles)}\n{roles.story()}"
        world.net.heal()
        target = max(roles.steps()) + 2
        assert await world.until(lambda: min(roles.steps()) >= target, within_s=60), f"{told(roles)}\n{roles.story()}"
