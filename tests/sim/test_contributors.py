"""A replica on a line that would slow everybody down, in virtual time: it rests, says why, and costs the others next to
nothing; steps stay exact, whoever dies.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peerd.run.runfile import LimitsSection, ModelSection, OptimizerSection, RunFile
from roles.trainer import TrainerRole
from tests.kit.amount import thorough
from tests.kit.exact import STEPS, Batches, differences, plain_torch
from tests.kit.virtual_time import virtual
from tests.worlds.roles.virtualroles import PacedDevice, Roles, virtual_run
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.simnet import SimLine
from tests.worlds.simulation.world import World, WorldConfig

pytestmark = pytest.mark.slow
MODEL = ModelSection(d_model=48, heads=2, layers=2, context=8)  # its gradient has 320 kB
FAST_MBIT, SLOW_MBIT = 10.0, 0.25  # a gradient takes a quarter of a second, and ten seconds
MICROBATCH_S = 0.3


def line(mbit: float) -> SimLine:
    return SimLine(latency_s=0.02, up_mbit_s=mbit, down_mbit_s=mbit)


def with_line(run: RunFile, mbit: float) -> RunFile:
    return msgspec.structs.replace(run, limits=LimitsSection(upload_mbit=mbit, download_mbit=mbit))


def run_of(folder: Path, **sections: Any) -> RunFile:
    return virtual_run(folder, (20000,), run="lines", **{"model": MODEL} | sections)


async def start(world: World, roles: Roles, name: str, mbit: float) -> None:
    program = roles.program(TrainerRole, run=with_line(roles.run, mbit))
    await world.start(name, line=line(mbit), program=program)


async def step_s(world: World, roles: Roles, steps: int) -> float:
    """Mean seconds of the next `steps` steps."""
    first, began = roles.replica_step(), trio.current_time()
    assert await world.until(lambda: roles.replica_step() >= first + steps, within_s=steps * 60), roles.story()
    return (trio.current_time() - began) / (roles.replica_step() - first)


def rests(roles: Roles, name: str) -> bool:
    role = roles.live.get(name)
    return role is not None and bool(role.replica.status().get("rests"))


async def begin(world: World, roles: Roles, fast: int, slow_mbit: float = SLOW_MBIT) -> None:
    """Start a backbone, fast replicas and a slow one; returns when that rests."""
    world.bootstrap.append((await world.start("boot")).full_addr)
    for number in range(fast):
        await start(world, roles, f"fast{number}", FAST_MBIT)
    await start(world, roles, "slow", slow_mbit)
    assert await world.until(lambda: rests(roles, "slow"), within_s=600), roles.story()


@pytest.mark.parametrize("first", [False, True], ids=["joins", "is there from the start"])
@virtual
async def test_a_slow_line_rests_says_why_and_costs_the_others_next_to_nothing(tmp_path: Path, first: bool) -> None:
    roles = Roles(run_of(tmp_path), tmp_path / "peers", partial(PacedDevice, MICROBATCH_S))
    async with World(1, swarm(), WorldConfig(line=lambda _: line(100.0))).running() as world:
        world.bootstrap.append((await world.start("boot")).full_addr)
        for number in range(3):
            await start(world, roles, f"fast{number}", FAST_MBIT)
        alone_s = 0.0
        if not first:
            assert await world.until(lambda: roles.replica_step() >= 3, within_s=120), roles.story()
            alone_s = await step_s(world, roles, 10)
        await start(world, roles, "slow", SLOW_MBIT)
        assert await world.until(lambda: rests(roles, "slow"), within_s=300), roles.story()
        with_it_s = await step_s(world, roles, 10)
        told = str(roles.live["slow"].replica.status()["waits_for"])
        print(told)
        assert told.startswith("this peer rests: a step takes ")
        assert "it would contribute with a connection of " in told
        assert "(it carries 0.25 Mb/s)" in told
        assert roles.live["slow"].replica.step < roles.replica_step()
        assert [note for note in roles.conductor_notes() if "rests" in note]
    print(f"{alone_s:.2f} s a step without it, {with_it_s:.2f} s with it")
    assert with_it_s <= (5.0 if first else 1.05 * alone_s)


EXACT = OptimizerSection(name="adamw", lr=3e-3, total_steps=STEPS)


@pytest.mark.parametrize("dies", ["", thorough("fast2"), thorough("the conductor"), thorough("slow")])
@virtual
async def test_steps_without_the_one_that_rests_are_exact_whoever_dies(
    tmp_path: Path, batches: Batches, dies: str
) -> None:
    model = msgspec.structs.replace(MODEL, dtype="float64")
    run = run_of(tmp_path, model=model, optimizer=EXACT)
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, MICROBATCH_S))
    async with World(1, swarm(), WorldConfig(line=lambda _: line(100.0))).running() as world:
        await begin(world, roles, 3)
        assert roles.replica_step() < STEPS - 3, "it did not rest in time to matter"
        names = [f"fast{number}" for number in range(3)]
        if dies == "the conductor":
            dies = next(name for name in roles.conductors())
        if dies:
            await world.kill(world.nodes[dies])
        left = [roles.live[name] for name in names if name != dies]
        served = [role.replica.post.served for role in left]

        def done() -> bool:
            return all(one.module.step == STEPS for one in served)

        assert await world.until(done, within_s=1200), roles.story()
        assert not [note for note in roles.conductor_notes() if "goes back" in note]
        modules = [one.module for one in served]
    assert batches.faults(per_step=24) == []
    plain = plain_torch(run, batches)
    for module in modules:
        assert differences(run, plain, [module]) == []


@pytest.mark.thorough
@virtual
async def test_when_most_rest_and_the_conductor_dies_the_run_goes_on_from_the_newest_step(tmp_path: Path) -> None:
    roles = Roles(run_of(tmp_path), tmp_path / "peers", partial(PacedDevice, MICROBATCH_S))
    async with World(1, swarm(), WorldConfig(line=lambda _: line(100.0))).running() as world:
        world.bootstrap.append((await world.start("boot")).full_addr)
        slow = [f"slow{number}" for number in range(3)]
        for name in slow:
            await start(world, roles, name, SLOW_MBIT)
        await trio.sleep(8)  # one of them conducts
        for number in range(2):
            await start(world, roles, f"fast{number}", FAST_MBIT)
        assert await world.until(lambda: all(rests(roles, name) for name in slow), within_s=900), roles.story()
        at = roles.replica_step()
        assert await world.until(lambda: roles.replica_step() >= at + 4, within_s=400), roles.story()
        before, conductors = roles.replica_step(), roles.conductors()
        for name in conductors:
            await world.kill(world.nodes[name])
        others = [name for name in slow if name not in conductors]
        assert await world.until(lambda: roles.replica_step() >= before + 3, within_s=400), roles.story()
        steps = [int(note.rsplit(maxsplit=1)[-1]) for note in roles.conductor_notes() if "swarm is at step" in note]
        print(f"killed {conductors} at step {before}; the swarm stood at {steps}")
        assert steps[-1] >= before - 1
        assert all(roles.live[name].replica.step < before for name in others if rests(roles, name))


@pytest.mark.thorough
@virtual
async def test_at_the_end_of_the_run_the_one_that_rests_fetches_the_finished_model(tmp_path: Path) -> None:
    run = run_of(tmp_path, optimizer=EXACT)
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, MICROBATCH_S))
    async with World(1, swarm(), WorldConfig(line=lambda _: line(100.0))).running() as world:
        await begin(world, roles, 3, slow_mbit=2 * SLOW_MBIT)  # a state takes a quarter of a minute
        slow = roles.live["slow"].replica

        def finished(name: str) -> bool:
            return bool([event for event in roles.logs[name].recent(500) if event["name"] == "trainer.finished"])

        names = [f"fast{number}" for number in range(3)]
        assert await world.until(lambda: all(map(finished, names)), within_s=1200), roles.story()
        assert await world.until(lambda: slow.step == STEPS, within_s=1200), roles.story()
        digests = {roles.live[name].replica.post.served.module.digest() for name in ("fast0", "slow")}
        assert len(digests) == 1


@pytest.mark.thorough
@virtual
async def test_where_all_others_die_the_one_that_rests_goes_on_from_what_is_left(tmp_path: Path) -> None:
    roles = Roles(run_of(tmp_path), tmp_path / "peers", partial(PacedDevice, MICROBATCH_S))
    async with World(1, swarm(), WorldConfig(line=lambda _: line(100.0))).running() as world:
        await begin(world, roles, 2 + 1)
        for number in range(3):
            await world.kill(world.nodes[f"fast{number}"])
        slow = roles.live["slow"].replica
        at = slow.step
        assert await world.until(lambda: slow.step > at + 1, within_s=1200), roles.story()
        assert not rests(roles, "slow")
