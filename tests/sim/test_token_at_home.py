"""A peer at home whose bootstrap peer refuses it: with a token it finds the others, over the connection it has."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from tests.worlds.network.athome import Homes
from tests.worlds.network.members import Organizer, run_file
from tests.worlds.network.world import home_line
from tests.worlds.roles.misfortunes import public_ip
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import World, WorldConfig

OTHERS = 10  # whose clocks are enough: the bootstrap peer has nothing to ask the one that it refuses
REFRESHED_WITHIN_S = 60.0  # its papers are looked at, and its entry peers asked, every twenty seconds


@pytest.mark.slow
async def test_a_peer_that_was_refused_joins_once_it_has_a_token(autojump_clock: MockClock) -> None:
    organizer = Organizer(run_file())
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        homes = Homes(world, organizer)
        boot = await world.start("boot", program=homes.program("public", relay=True), ip=public_ip(0))
        world.bootstrap.append(boot.full_addr)
        for number in range(2, 2 + OTHERS):
            await world.start(f"n{number}", program=homes.program("public"), ip=public_ip(number))
        organizer.withhold("home")
        home = await world.start("home", program=homes.program("port-restricted"), ip=public_ip(1))
        waits_for = "it refuses us"
        assert await world.until(lambda: waits_for in (home.dht.status()["waits_for"] or ""), within_s=30)
        assert home.host.connected() == [boot.id]
        organizer.renew("home")
        assert await world.until(lambda: boot.id in home.dht.contacts(), within_s=REFRESHED_WITHIN_S)
