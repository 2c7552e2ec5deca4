"""Thirty whole peers - host, calls, DHT - under virtual time: records stay found while the swarm changes."""

from __future__ import annotations

import pytest
import trio

from peerd.core.ids import Key
from peerd.sim.clock import run_virtual
from peerd.sim.programs import swarm
from peerd.sim.world import Churn, Node, World, WorldConfig
from tests.worlds.network.world import home_line, joined

PEERS = 30
RECORDS = 12
CHURN_S = 12.0


async def _found(node: Node, number: int) -> bool:
    records = await node.dht.get(Key.of(f"record {number}"))
    return [record.value for record in records] == [f"value {number}".encode()]


async def _publish(nodes: list[Node]) -> None:
    async def put(number: int) -> None:
        key, value = Key.of(f"record {number}"), f"value {number}".encode()
        assert await nodes[number].dht.put(key, value, ttl_s=600) >= 3

    async with trio.open_nursery() as nursery:
        for number in range(RECORDS):
            nursery.start_soon(put, number)


async def _changing_swarm(seed: int) -> str:
    config = WorldConfig(line=home_line)
    async with World(seed, swarm(), config).running() as world:
        nodes = await joined(world, PEERS)
        await _publish(nodes)
        publishers = frozenset(node.name for node in nodes[:RECORDS])
        asked: list[bool] = []

        async def ask(node: Node, number: int) -> None:
            found = await _found(node, number)
            if node.up:
                asked.append(found)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.churn, Churn(share=0.3, within_s=CHURN_S, spare=publishers))
            rng = world.rng("questions")
            while trio.current_time() < CHURN_S + 5:
                await trio.sleep(0.5)
                nursery.start_soon(ask, rng.choice(world.living()), rng.randrange(RECORDS))
        assert world.trace.counts["kill"] == 9
        assert len(asked) > 20
        assert sum(asked) >= 0.99 * len(asked)

        world.partition(nodes[:5])  # five publishers, alone
        assert await _found(nodes[0], 0)
        world.net.heal()
        assert await _found(world.living()[-1], 0)
    print(f"seed {seed}, trace {world.trace.hash()}, {world.trace.counts.total()} events")
    return world.trace.hash()


@pytest.mark.slow
@pytest.mark.thorough
def test_records_stay_found_while_a_third_of_thirty_peers_is_replaced(seed: int) -> None:
    run_virtual(_changing_swarm, seed, seed=seed)
