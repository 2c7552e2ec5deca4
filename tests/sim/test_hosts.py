"""Thirty real hosts - Noise, yamux, identify - over a simulated network: they meet, talk, part, and find back."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
import trio
import trio.testing

from peerd.wire.host.host import PeerDown
from tests.worlds.simulation import faults
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.programs import hosts, try_echo, try_ping
from tests.worlds.simulation.simnet import SimLine
from tests.worlds.simulation.world import Churn, Node, World, WorldConfig

HOSTS = 30
SEARCH_S = 30.0  # for pings that may have to dial


def _line(rng: random.Random) -> SimLine:
    return SimLine(latency_s=rng.uniform(0.005, 0.08), jitter_s=0.005, up_mbit_s=20, down_mbit_s=100, loss=0.001)


CONFIG = WorldConfig(line=_line)


@dataclass
class Seen:
    """The results of one run."""

    connected: int = 0
    pings: int = 0
    echoes: int = 0
    pings_across_the_cut: int = 0
    pings_after_healing: int = 0
    reset_noticed_s: float = 0.0
    silence_noticed_s: float = 0.0
    pings_of_the_returned: int = 0
    living: int = 0
    trace: str = ""


async def _introduce(nodes: list[Node], seen: Seen) -> None:
    """All connect to the first; addresses of the others they get from the test, for no DHT runs here."""
    boot, *others = nodes
    async with trio.open_nursery() as nursery:
        for node in others:
            nursery.start_soon(node.host.connect_addr, boot.full_addr)
    seen.connected = sum(boot.id in node.host.connected() for node in others)
    for node in nodes:
        for other in nodes:
            node.host.learn(other.id, [other.addr])


async def _count(pairs: list[tuple[Node, Node]], talk: Callable[[Node, Node], Awaitable[float | None]]) -> int:
    """The number of pairs that can talk when all try at once."""
    succeeded = 0

    async def one(a: Node, b: Node) -> None:
        nonlocal succeeded
        took_s = await talk(a, b)
        succeeded += took_s is not None

    async with trio.open_nursery() as nursery:
        for a, b in pairs:
            nursery.start_soon(one, a, b)
    return succeeded


async def _count_pings(pairs: list[tuple[Node, Node]], within_s: float) -> int:
    return await _count(pairs, functools.partial(try_ping, within_s=within_s))


async def _noticed(watcher: Node, world: World, victim: Node, *, silent: bool) -> float:
    """Seconds from the death of `victim` until `watcher`, who has a link to it, is told."""
    killed_s = noticed_s = trio.current_time()
    with watcher.host.watch() as events:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(functools.partial(world.kill, victim, silent=silent))
            async for event in events:
                if isinstance(event, PeerDown) and event.peer == victim.id:
                    noticed_s = trio.current_time()
                    break
    return noticed_s - killed_s


async def _life(seed: int) -> Seen:
    seen = Seen()
    async with World(seed, hosts(), CONFIG).running() as world:
        nodes = await world.start_many(HOSTS)
        await _introduce(nodes, seen)
        ring = list(zip(nodes, nodes[3:] + nodes[:3], strict=True))
        seen.pings = await _count_pings(ring, SEARCH_S)
        seen.echoes = await _count(ring[:10], lambda a, b: try_echo(a, b, 100_000, within_s=60))

        world.partition(nodes[:10])
        across = [(a, b) for a, b in ring if (a in nodes[:10]) != (b in nodes[:10])]
        assert len(across) == 6
        seen.pings_across_the_cut = await _count_pings(across, 5.0)
        world.net.heal()
        seen.pings_after_healing = await _count_pings(ring, SEARCH_S)

        seen.reset_noticed_s = await _noticed(nodes[0], world, nodes[3], silent=False)
        seen.silence_noticed_s = await _noticed(nodes[1], world, nodes[4], silent=True)
        await world.restart(nodes[3])
        await world.restart(nodes[4])
        seen.pings_of_the_returned = await _count_pings([(nodes[0], nodes[3]), (nodes[1], nodes[4])], SEARCH_S)
        seen.living = len(world.living())
        seen.trace = world.trace.hash()
    print(f"seed {seed}: {seen}")
    return seen


@pytest.mark.slow
def test_thirty_hosts_meet_survive_a_partition_and_deaths_and_repeat_exactly(seed: int) -> None:
    seen = run_virtual(_life, seed, seed=seed)
    assert seen.connected == HOSTS - 1
    assert seen.pings == HOSTS
    assert seen.echoes == 10
    assert seen.pings_across_the_cut == 0
    assert seen.pings_after_healing == HOSTS
    assert seen.reset_noticed_s < 0.5
    assert 3 < seen.silence_noticed_s < 120
    assert seen.pings_of_the_returned == 2
    assert seen.living == HOSTS
    assert run_virtual(_life, seed, seed=seed) == seen
    assert run_virtual(_life, seed + 1, seed=seed + 1).trace != seen.trace


async def _talks(a: Node, b: Node) -> bool:
    """True when `a` reaches `b`. The first try may find a link that the other side has forgotten; a death excuses."""
    lives = a.incarnation, b.incarnation
    a.host.learn(b.id, [b.addr])  # it may have come back with an empty memory
    for _ in range(2):
        if await try_ping(a, b, within_s=60) is not None:
            return True
    return (a.incarnation, b.incarnation) != lives or not (a.up and b.up)


@pytest.mark.slow
async def test_hosts_keep_talking_while_half_of_them_are_replaced(autojump_clock: trio.testing.MockClock) -> None:
    async with World(5, hosts(), CONFIG).running() as world, trio.open_nursery() as nursery:
        nodes = await world.start_many(12)
        await _introduce(nodes, Seen())
        nursery.start_soon(world.churn, Churn(share=0.5, within_s=60, absent_s=3, spare=frozenset({"n00"})))
        results: list[bool] = []

        async def one(a: Node, b: Node) -> None:
            results.append(await _talks(a, b))

        async with trio.open_nursery() as talks:
            for _ in range(20):
                await trio.sleep(3)
                for pair in itertools.pairwise(world.living()):
                    talks.start_soon(one, *pair)
        assert len(results) > 150
        assert all(results)
        assert await _count_pings([(nodes[0], node) for node in nodes[1:]], 120) == 11


async def test_a_line_that_corrupts_bytes_never_delivers_wrong_ones(autojump_clock: trio.testing.MockClock) -> None:
    async with World(1, hosts(), CONFIG).running() as world:
        a, b = await world.start_many(2)
        a.host.learn(b.id, [b.addr])
        assert await try_echo(a, b, 50_000, within_s=30) is not None
        await faults.inject(world, [faults.corrupt("n01", 0, 1.0)])
        assert await try_echo(a, b, 50_000, within_s=30) is None
        await faults.inject(world, [faults.corrupt("n01", 0, 0.0)])
        assert await try_echo(a, b, 50_000, within_s=30) is not None
