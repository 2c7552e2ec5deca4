"""Many real hosts under the virtual clock: hand-shakes, multiplexing, calls and directory as the daemon runs them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial

import pytest
import trio

from peerd.core.ids import Key
from peerd.dht.dht import DhtConfig
from peerd.dht.node.node_state import KademliaConfig
from tests.worlds.network.world import home_line
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import Node, World, WorldConfig

HOSTS = int(os.environ.get("PEERD_TEST_HOSTS", "40"))  # 300 take five minutes, 1,000 fifteen
COPIES = 8 if HOSTS <= 40 else 6  # of a value, when its publisher has waited for 10 s
BACKBONES = 3 if HOSTS <= 300 else 16  # each has room for 307 strangers, and each host wants three
VALUES, LOOKUPS = 8, 32
AT_ONCE = 16  # that come, or go
TABLE = KademliaConfig(k=8, wide=())  # so that nobody knows everybody


@pytest.mark.slow
@pytest.mark.timeout(300 if HOSTS <= 100 else 7200)
@pytest.mark.thorough
def test_real_hosts_that_joined_through_a_few_backbones_find_everything_with_a_fifth_of_them_killed() -> None:
    assert run_virtual(_found_after_loss, 1, seed=1) == LOOKUPS


async def _found_after_loss(seed: int) -> int:
    """How many look-ups, each by a host that never asked for the key, found its value."""
    world, rng = (
        World(seed, swarm(dht_config=DhtConfig(node=TABLE)), WorldConfig(line=home_line)),
        random.Random(f"{seed}/many hosts"),
    )
    keys = [Key.of(f"value {number}") for number in range(VALUES)]
    async with world.running():
        await world.start_many(BACKBONES, bootstrap=True)
        while len(world.nodes) < HOSTS:
            async with trio.open_nursery() as nursery:
                for number in range(len(world.nodes), min(len(world.nodes) + AT_ONCE, HOSTS)):
                    nursery.start_soon(partial(world.start, ip=f"{20 + number // 250}.{number % 250}.1.1"))
            await trio.sleep(1.0)
        # A host that nobody has asked for anything meets others when its table is refreshed.
        known = await world.until(lambda: min(_known(world)) >= TABLE.k, within_s=60)
        assert known, f"peers that each host knows: {sorted(_known(world))[:20]}"
        async with trio.open_nursery() as nursery:
            for key in keys:
                nursery.start_soon(_put, world, rng.randrange(HOSTS), key)
        await _kill(world, rng.sample(world.living()[BACKBONES:], HOSTS // 5), lambda: rng.random() < 0.5)
        found = 0
        for number in range(LOOKUPS):
            key, reader = keys[number % VALUES], rng.choice(world.living())
            found += any(record.value == key.raw for record in await reader.dht.get(key))
        await _kill(world, world.living(), lambda: True)  # what ends together needs far more memory
        return found


async def _kill(world: World, nodes: list[Node], is_silent: Callable[[], bool]) -> None:
    """Kill some at a time."""
    for at in range(0, len(nodes), AT_ONCE):
        async with trio.open_nursery() as nursery:
            for node in nodes[at : at + AT_ONCE]:
                nursery.start_soon(partial(world.kill, node, silent=is_silent()))


def _known(world: World) -> list[int]:
    """Number of peers in the table of each host."""
    return [node.dht.status()["peers"] for node in world.living()]


async def _put(world: World, number: int, key: Key) -> None:
    assert await world.living()[number].dht.put(key, key.raw, ttl_s=3000.0) >= COPIES
