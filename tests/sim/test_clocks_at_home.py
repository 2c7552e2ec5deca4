"""Clocks of peers at home, which answer no look-ups: they are compared wherever two of them are connected."""

from __future__ import annotations

import pytest
from trio.testing import MockClock

from peerd.core.addr import is_relayed
from tests.worlds.network.athome import Homes
from tests.worlds.network.world import home_line
from tests.worlds.roles.misfortunes import public_ip
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import World, WorldConfig

WRONG_S = -30.0


@pytest.mark.slow
async def test_a_wrong_clock_at_home_is_corrected_by_those_of_others_at_home(autojump_clock: MockClock) -> None:
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        homes = Homes(world)
        boot = await world.start("boot", program=homes.program("public", relay=True), ip=public_ip(0))
        world.bootstrap.append(boot.full_addr)
        for number in range(1, 4):
            skew_s, program = WRONG_S if number == 1 else 0.0, homes.program("port-restricted")
            await world.start(f"home{number}", program=program, ip=public_ip(number), skew_s=skew_s)
        wrong, *others = (world.nodes[f"home{number}"] for number in range(1, 4))
        assert await world.until(lambda: all(any(map(is_relayed, one.host.addrs())) for one in others), within_s=60)
        assert wrong.dht.status()["clock_offset_s"] == 0.0, "of two clocks nobody can say which is wrong"
        for one in others:
            wrong.host.learn(one.id, one.host.addrs())
            await wrong.host.connect(one.id)
        assert await world.until(lambda: abs(wrong.dht.status()["clock_offset_s"] + WRONG_S) < 1, within_s=60)
        assert all(abs(one.dht.status()["clock_offset_s"]) < 1 for one in others)
