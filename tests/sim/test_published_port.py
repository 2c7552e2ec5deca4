"""A backbone behind a published port, as in a container: it knows its inner addresses only, and newcomers join at once.

Its router lets everybody in at another port outside, which only the user, and whoever dialed it there, knows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from multiaddr import Multiaddr

from peerd.core.addr import split_peer, tcp_addr, with_peer
from peerd.run.runfile import BatchSection
from peerd.wire.host.addresses import CONFIGURED
from roles.trainer import TrainerRole
from tests.kit.amount import thorough
from tests.worlds.network.athome import Homes
from tests.worlds.network.world import home_line
from tests.worlds.roles.misfortunes import public_ip
from tests.worlds.roles.virtualroles import PacedDevice, Roles, virtual_run
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.nat import Kind
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import PORT, Node, World, WorldConfig

PUBLISHED, WITHIN_S = 31338, 10.0


@asynccontextmanager
async def published(announced: bool = False) -> AsyncIterator[tuple[World, Homes, Node, Multiaddr]]:
    """A world with a backbone behind a published port, and its address outside, which newcomers are given."""
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        homes, outside = Homes(world), tcp_addr(public_ip(0), PUBLISHED)
        boot = await world.start("boot", program=homes.program("port-restricted", relay=True), ip=public_ip(0))
        homes.router("boot").forward(PORT, PUBLISHED)
        if announced:
            boot.host.whereabouts.announce(CONFIGURED, [outside])
        world.bootstrap.append(with_peer(outside, boot.id))
        yield world, homes, boot, outside


async def join(roles: Roles, kind: Kind) -> None:
    async with published() as (world, homes, boot, outside):
        began = trio.current_time()
        new = await world.start("new", program=roles.program(TrainerRole, homes.program(kind)), ip=public_ip(1))
        joined = await world.until(lambda: roles.replica_step() >= 1, within_s=WITHIN_S)
        print(f"behind a {kind} router: the first step after {trio.current_time() - began:.1f} s")
        assert joined, roles.live["new"].status()["waits_for"]
        assert new.dht.contacts()[boot.id][0] == outside, "what led there is named before what the peer says of itself"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["port-restricted", thorough("symmetric"), thorough("public")])
def test_the_first_newcomer_of_a_backbone_behind_a_published_port_joins_in_ten_seconds(
    tmp_path: Path, kind: Kind
) -> None:
    run = virtual_run(tmp_path, (40_000,), batch=BatchSection(target_samples=4))
    run_virtual(join, Roles(run, tmp_path / "peers", partial(PacedDevice, 0.1)), kind, seed=1)


async def announce() -> None:
    async with published(announced=True) as (world, homes, boot, outside):
        assert boot.host.addrs()[0] == with_peer(outside, boot.id)
        new = await world.start("new", program=homes.program("port-restricted"), ip=public_ip(1))
        assert await world.until(lambda: new.host.info(boot.id) is not None, within_s=WITHIN_S)
        await trio.sleep(30.0)  # strangers have dialed back, as far as there are any
        told = [split_peer(addr)[0] for addr in boot.host.addrs()]
        assert told[0] == outside
        assert outside in new.host.known_addrs(boot.id)


@pytest.mark.slow
def test_an_announced_address_is_the_first_that_others_are_told(tmp_path: Path) -> None:
    run_virtual(announce, seed=1)
