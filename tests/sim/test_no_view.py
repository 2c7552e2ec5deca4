"""A newcomer that knows nothing of its run concludes nothing: it waits, names the cause, and begins no second swarm.

Its clock is off, its directory is silent, or no member answers it; once that is mended it joins the live run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from peerd.run.runfile import BatchSection
from peerd.swarm.directory import RECORD_TTL_S
from peerd.swarm.roster import START
from roles.trainer import TrainerRole
from tests.kit.amount import thorough
from tests.kit.virtual_time import virtual
from tests.worlds.network.world import home_line
from tests.worlds.roles.virtualroles import PacedDevice, Roles, virtual_run
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import World, WorldConfig

SILENT_S = 90.0
HOUR_S, DAY_S = 3600.0, 86_400.0


def roles_in(tmp_path: Path) -> Roles:
    run = virtual_run(tmp_path, (40_000,), batch=BatchSection(target_samples=4))
    return Roles(run, tmp_path / "peers", partial(PacedDevice, 3.0))


@asynccontextmanager
async def live_run(roles: Roles, prefix: str) -> AsyncIterator[World]:
    """A run of one replica that makes steps; all machines have addresses that begin with `prefix`."""
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        world.bootstrap.append((await world.start("boot", ip=f"{prefix}.1")).full_addr)
        await world.start("old", program=roles.program(TrainerRole), ip=f"{prefix}.10")
        assert await world.until(lambda: roles.replica_step() >= 1, within_s=60), roles.story()
        yield world


def waits_for(roles: Roles) -> str:
    return str(roles.live["new"].status()["waits_for"])


def has_begun(roles: Roles) -> bool:
    """True if the newcomer has a part in any swarm."""
    role = roles.live.get("new")
    return role is not None and role.replica.position != START


async def waits(world: World, roles: Roles, for_s: float) -> None:
    """The newcomer takes no part for so long, while the run goes on."""
    before = roles.replica_step()
    began = await world.until(lambda: "new" in roles.conductors() or has_begun(roles), within_s=for_s)
    assert not began, f"it conducts: {roles.conductors()}\n{roles.story()}"
    assert roles.replica_step() > before


async def joins(world: World, roles: Roles) -> None:
    def one_swarm() -> bool:
        if "new" not in roles.live or roles.live["new"].replica is None:
            return False
        old, new = (roles.live[name].replica.position for name in ("old", "new"))
        return old == new != START and roles.conductors() == ["old"]

    assert await world.until(one_swarm, within_s=90), roles.story()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("skew_s", "prefix", "corrected"),
    [
        (-HOUR_S, "198.51.100", False),  # of one network nobody can tell whose clock is wrong
        thorough(HOUR_S, "198.51.100", False),
        (37 * DAY_S, "10.0.0", False),  # too far to correct
        thorough(-37 * DAY_S, "10.0.0", False),
        thorough(HOUR_S, "10.0.0", True),
    ],
)
@virtual
async def test_a_newcomer_whose_clock_is_off_waits_until_it_is_set(
    tmp_path: Path, skew_s: float, prefix: str, corrected: bool
) -> None:
    roles = roles_in(tmp_path)
    async with live_run(roles, prefix) as world:
        node = await world.start("new", program=roles.program(TrainerRole), skew_s=skew_s, ip=f"{prefix}.99")
        if not corrected:
            await waits(world, roles, SILENT_S)
            print(waits_for(roles))
            assert waits_for(roles).startswith("this machine's clock is "), waits_for(roles)
            node.clock.skew_s = 0.0  # the user sets it
        await joins(world, roles)


@pytest.mark.slow
@virtual
async def test_a_newcomer_whose_directory_is_silent_waits_until_it_answers(tmp_path: Path) -> None:
    roles = roles_in(tmp_path)
    async with live_run(roles, "10.0.0") as world:
        world.net.stall("boot")
        await world.start("new", program=roles.program(TrainerRole))
        await waits(world, roles, SILENT_S)
        print(waits_for(roles))
        assert "bootstrap" in waits_for(roles)
        world.net.resume("boot")
        await joins(world, roles)


@pytest.mark.slow
@virtual
async def test_a_newcomer_whom_no_member_answers_waits_for_one(tmp_path: Path) -> None:
    roles = roles_in(tmp_path)
    async with live_run(roles, "10.0.0") as world:
        world.net.block("old", "new")
        await world.start("new", program=roles.program(TrainerRole))
        await waits(world, roles, 2 * RECORD_TTL_S)
        print(waits_for(roles))
        assert waits_for(roles).startswith("an answer of a member")
        world.net.heal()
        await joins(world, roles)


@pytest.mark.slow
@virtual
async def test_a_newcomer_begins_once_the_records_of_all_that_are_gone_have_expired(tmp_path: Path) -> None:
    roles = roles_in(tmp_path)
    async with live_run(roles, "10.0.0") as world:
        for node in world.living():
            if node.name != "boot":
                await world.kill(node, silent=True)
        began = trio.current_time()
        await world.start("new", program=roles.program(TrainerRole))
        assert await world.until(lambda: has_begun(roles), within_s=2 * RECORD_TTL_S), roles.story()
        print(f"began after {trio.current_time() - began:.0f} s")
