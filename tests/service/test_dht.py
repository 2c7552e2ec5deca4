"""The DHT over real hosts in a simulated network: put here, get there, and what happens when peers come and go."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest
import trio

from peerd.core.ids import Key
from peerd.net.host import Host
from peerd.service.dht import Dht
from peerd.service.rpc import Rpc
from peerd.sim.clock import run_virtual
from peerd.sim.world import Node, World

KEY = Key.of("run/stage/0")


async def program(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
    """Host, calls and DHT together, joining through whatever the world calls its bootstrap."""
    node.host = Host(node.keypair, node.clock, [node.transport])
    node.rpc = Rpc(node.host, node.clock)
    node.dht = Dht(node.host, node.rpc, node.clock, node.keypair)
    async with trio.open_nursery() as nursery:
        await nursery.start(node.host.run, [node.addr])
        await nursery.start(node.rpc.run)
        await nursery.start(node.dht.run, list(node.world.bootstrap))
        task_status.started()


def in_world(main: Any, seed: int = 1) -> None:
    """Run `main(world)` in a virtual world."""

    async def whole() -> None:
        async with World(seed, program).running() as world:
            first = await world.start()
            world.bootstrap.append(first.full_addr)
            await main(world)

    run_virtual(whole, seed=seed)


async def swarm(world: World, count: int) -> list[Node]:
    """`count` nodes that have all joined."""
    while len(world.nodes) < count:
        node = await world.start()
        await node.dht.get(KEY)  # waits until it has joined
    return world.living()


async def values(node: Node, key: Key = KEY) -> list[bytes]:
    return [record.value for record in await node.dht.get(key)]


def test_three_peers_see_what_each_of_them_put() -> None:
    async def main(world: World) -> None:
        nodes = await swarm(world, 3)
        for index, node in enumerate(nodes):
            assert await node.dht.put(KEY, b"from %d" % index, ttl_s=60) == 3
        for node in nodes:
            found = await node.dht.get(KEY)
            assert sorted(record.value for record in found) == [b"from 0", b"from 1", b"from 2"]
            assert [record.sub_key for record in found] == sorted(record.sub_key for record in found)

    in_world(main)


def test_alone_it_serves_itself_and_tells_newcomers() -> None:
    async def main(world: World) -> None:
        alone = world.living()[0]
        assert await alone.dht.put(KEY, b"first", ttl_s=60) == 1
        assert await values(alone) == [b"first"]
        newcomer = await world.start()
        assert await values(newcomer) == [b"first"]

    in_world(main)
