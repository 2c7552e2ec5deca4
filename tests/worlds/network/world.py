"""Swarms under virtual time that are ready to be tested: lines as people have them, and peers that know one another."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.simnet import SimLine
from tests.worlds.simulation.world import World, WorldConfig


def home_line(rng: random.Random) -> SimLine:
    """A connection as at home: 5 to 50 ms from the backbone, 20 up, 100 down, a lost packet in a thousand."""
    return SimLine(latency_s=rng.uniform(0.005, 0.05), up_mbit_s=20, down_mbit_s=100, loss=0.001)


@asynccontextmanager
async def home_world(seed: int = 1) -> AsyncIterator[World]:
    """A world of lines at home, and one node in it that others join through."""
    async with World(seed, swarm(), WorldConfig(line=home_line)).running() as world:
        boot = await world.start("boot")
        world.bootstrap.append(boot.full_addr)
        yield world
