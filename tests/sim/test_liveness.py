"""Bad luck in the middle of a step, without malice: the step goes on within half a minute, whoever is concerned.

A member that stands still while its stage averages, a network in which one hears the other and not the reverse. Two
stages of two peers and two trainers, under virtual time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio

from peerd.core.run.runfile import (
    BatchSection,
    CheckpointSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.sim.clock import run_virtual
from peerd.sim.programs import swarm
from peerd.sim.world import World, WorldConfig
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.amount import some, thorough
from tests.kit.virtualroles import Roles, virtual_run
from tests.kit.world import home_line

WITHIN_S = 30.0
Trouble = Callable[[World, Roles], Awaitable[None]]


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return virtual_run(
        tmp_path,
        (4000,) * 10,
        model=ModelSection(d_model=8, heads=1, layers=2, context=8),
        pipeline=PipelineSection(stages=2, microbatch=1),
        optimizer=OptimizerSection(name="adamw", lr=1e-3),
        batch=BatchSection(target_samples=8),
        checkpoint=CheckpointSection(every_steps=0),
    )


def names(roles: Roles, stage: int, conducts: bool | None = None) -> list[str]:
    """Of stage peers, by stage and whether they conduct."""
    found = [(name, role) for name, role in sorted(roles.live.items()) if isinstance(role, StageRole)]
    return [n for n, r in found if r.stage == stage and conducts in (None, r._services.conducting.acting)]


async def averaging(roles: Roles, name: str) -> None:
    """Until this peer is in the middle of a round."""
    begun, of = trio.Event(), roles.live[name].post.orders
    average = of._average

    async def noting(*rest: Any) -> Any:
        begun.set()
        return await average(*rest)

    of._average = noting
    await begun.wait()
    of._average = average


async def a_member_stands_still_while_it_averages(world: World, roles: Roles) -> None:
    (name, *_) = names(roles, 1)
    await averaging(roles, name)
    world.net.stall(name)
    await trio.sleep(20)
    world.net.resume(name)


async def the_conductor_stands_still_while_all_average(world: World, roles: Roles) -> None:
    (name,) = names(roles, 0, conducts=True)
    await averaging(roles, name)
    world.net.stall(name)
    await trio.sleep(20)
    world.net.resume(name)


def one_way(source: Callable[[Roles], str], target: Callable[[Roles], str]) -> Trouble:
    async def cut(world: World, roles: Roles) -> None:
        world.net.block(source(roles), target(roles), both=False)
        await trio.lowlevel.checkpoint()

    return cut


def conductor(roles: Roles) -> str:
    return names(roles, 0, conducts=True)[0]


def mate(roles: Roles) -> str:
    return names(roles, 0, conducts=False)[0]


TROUBLES: dict[str, Trouble] = {
    "a member stands still": a_member_stands_still_while_it_averages,
    "the conductor stands still": the_conductor_stands_still_while_all_average,
    "a trainer does not reach a stage peer": one_way(lambda r: "trainer0", lambda r: names(r, 1)[0]),
    "a stage peer does not reach a trainer": one_way(lambda r: names(r, 1)[0], lambda r: "trainer0"),
    "stage-mates hear each other one way": one_way(lambda r: names(r, 1)[0], lambda r: names(r, 1)[1]),
    "a member does not reach the conductor": one_way(mate, conductor),
    "the conductor does not reach a member": one_way(conductor, mate),
}
FIRST = ("the conductor stands still", "a trainer does not reach a stage peer")  # the others: in test-all


async def goes_on(seed: int, roles: Roles, trouble: Trouble) -> None:
    async with World(seed, swarm(), WorldConfig(line=home_line)).running() as world:
        boot = await world.start("boot")
        world.bootstrap.append(boot.full_addr)
        for i in range(4):
            await world.start(f"stage{i}", program=roles.program(StageRole))
        for i in range(2):
            await world.start(f"trainer{i}", program=roles.program(TrainerRole))
        assert await world.until(lambda: min(roles.steps(), default=0) >= 3, within_s=60), roles.story()
        async with trio.open_nursery() as nursery:
            before = max(roles.steps())
            began = trio.current_time()
            nursery.start_soon(trouble, world, roles)

            def on() -> bool:
                return max(roles.steps()) >= before + 3

            assert await world.until(on, within_s=WITHIN_S), f"{told(roles)}\n{roles.story()}"
            assert trio.current_time() - began < WITHIN_S
        world.net.heal()
        target = max(roles.steps()) + 2
        assert await world.until(lambda: min(roles.steps()) >= target, within_s=60), f"{told(roles)}\n{roles.story()}"


def told(roles: Roles) -> dict[str, Any]:
    """Name of a peer -> its role's `waits_for`."""
    return {name: role.status()["waits_for"] for name, role in sorted(roles.live.items())}


@pytest.mark.slow
@pytest.mark.parametrize("delayed", [False, thorough(True)])
@pytest.mark.parametrize("trouble", some(sorted(TROUBLES, key=lambda name: (name not in FIRST, name)), len(FIRST)))
def test_a_step_goes_on_within_half_a_minute(tmp_path: Path, run: RunFile, trouble: str, delayed: bool) -> None:
    torch.set_num_threads(1)
    run = msgspec.structs.replace(run, optimizer=msgspec.structs.replace(run.optimizer, delayed=delayed))
    run_virtual(goes_on, 1, Roles(run, tmp_path / "peers"), TROUBLES[trouble], seed=1)
