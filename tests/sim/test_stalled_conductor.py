"""A conductor that stands still for a while, as a closed laptop does: others take over, and it gives up the duty."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import trio

from peerd.run.runfile import AveragingSection, OptimizerSection
from roles.trainer import TrainerRole
from tests.kit.amount import some
from tests.kit.virtual_time import virtual
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run
from tests.worlds.simulation.faults import inject, stall

STALLS, STALL_S = 4, 14.0  # a report is given up after ten seconds, and another way is tried for three
PATIENCE_S = 45.0  # for two steps; a microbatch that nobody finishes would hold them up for 120


@pytest.mark.parametrize("seed", some([0, 1], 1))
@virtual
async def test_a_delayed_run_goes_on_after_its_conductor_stood_still(tmp_path: Path, seed: int) -> None:
    run = virtual_run(
        tmp_path,
        (40_000,),
        optimizer=OptimizerSection(name="adamw", lr=1e-3, delayed=True),
        averaging=AveragingSection(sender_timeout_s=4.0),
    )
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, 0.25))
    rng = random.Random(seed)
    async with replica_world(roles, 2, seed=seed, step=0) as world:

        async def goes_on() -> None:
            wanted = roles.replica_step() + 2
            assert await world.until(lambda: roles.replica_step() >= wanted, within_s=PATIENCE_S), roles.story()

        for _ in range(STALLS):
            await goes_on()
            await trio.sleep(rng.random() * 3)
            await inject(world, [stall(name, 0.0, STALL_S) for name in roles.conductors()[:1]])
        await goes_on()
    handed_on = [note for note in roles.conductor_notes() if "hands over the conductor's duty" in note]
    assert len(handed_on) >= STALLS, "it was taken over each time, and whoever had stood still gave it up"


def reigns(roles: Roles) -> int:
    return len([note for note in roles.conductor_notes() if "conducts the run from now on" in note])


@pytest.mark.thorough
@virtual
async def test_a_newcomer_finds_the_conductor_though_an_older_member_is_back(tmp_path: Path) -> None:
    run = virtual_run(tmp_path, (40_000,), averaging=AveragingSection(sender_timeout_s=4.0))
    roles, counts = Roles(run, tmp_path / "peers", partial(PacedDevice, 0.25)), list[int]()
    async with replica_world(roles, 2, step=2) as world:
        (first,) = roles.conductors()
        await inject(world, [stall(first, 0.0, 2 * STALL_S)])
        before = roles.replica_step()
        assert await world.until(lambda: roles.replica_step() >= before + 2, within_s=PATIENCE_S), roles.story()
        counts.append(reigns(roles))
        await world.start("newcomer", program=roles.program(TrainerRole))
        newcomer = roles.live["newcomer"].replica
        assert await world.until(lambda: newcomer.position.step >= before + 4, within_s=PATIENCE_S), roles.story()
        await trio.sleep(STALL_S)
        counts.append(reigns(roles))
    assert counts[0] >= 2, "another has taken the duty on"
    assert counts[1] == counts[0], "and keeps it, though the newcomer asks the older one first"
