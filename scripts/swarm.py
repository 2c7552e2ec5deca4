"""Simulates a swarm in virtual time and prints statistics: `python scripts/swarm.py --hosts 30 --churn 0.3`.

Runs real hosts (Noise, yamux, identify) over a simulated network, on one core, without sockets. Each node pings another
one every few seconds and, with --dht, publishes and reads records, while nodes leave and are replaced. The same options
and seed always give the same trace hash.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import trio

if __package__ in (None, ""):  # run as a script, so the repository is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peerd.core.errors import PeerdError
from peerd.core.ids import Key
from scripts.check_report import add_json, show
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.programs import hosts, swarm, try_ping
from tests.worlds.simulation.simnet import NetConfig, SimLine
from tests.worlds.simulation.world import Churn, Node, World, WorldConfig

PING_LIMIT_S = 10.0


@dataclass
class Report:
    """The printed figures. `*_s` are in virtual seconds, except for `wall_s`."""

    hosts: int
    seed: int
    virtual_s: float = 0.0
    wall_s: float = 0.0
    left: int = 0
    pings: int = 0
    pings_answered: int = 0
    ping_median_ms: float = 0.0
    ping_99_ms: float = 0.0
    puts: int = 0
    gets: int = 0
    gets_found: int = 0
    megabytes: float = 0.0
    events: int = 0
    trace: str = ""
    times_s: list[float] = field(default_factory=list, repr=False)


async def pinging(world: World, report: Report, every_s: float) -> None:
    rng = world.rng("pings")
    async with trio.open_nursery() as nursery:
        while True:
            await trio.sleep(rng.expovariate(len(world.living()) / every_s))
            source, target = rng.sample(world.living(), 2)
            nursery.start_soon(one_ping, source, target, report)


async def one_ping(source: Node, target: Node, report: Report) -> None:
    took_s = await try_ping(source, target, within_s=PING_LIMIT_S)
    if source.up and target.up:  # a node that was killed meanwhile cannot answer
        report.pings += 1
        report.pings_answered += took_s is not None
        report.times_s += [took_s] if took_s is not None else []


async def records(world: World, report: Report, every_s: float) -> None:
    rng = world.rng("records")
    published: dict[str, str] = {}  # name of the record -> name of the node that put it
    async with trio.open_nursery() as nursery:
        while True:
            await trio.sleep(rng.expovariate(len(world.living()) / every_s))
            node = rng.choice(world.living())
            known = [name for name, owner in published.items() if world.nodes[owner].up]
            if rng.random() < 0.3 or not known:
                name = f"record {len(published)}"
                published[name] = node.name
                nursery.start_soon(put, node, name, report)
            else:
                nursery.start_soon(get, node, rng.choice(known[:-1] or known), report)


async def put(node: Node, name: str, report: Report) -> None:
    try:
        await node.dht.put(Key.of(name), name.encode(), ttl_s=600)
        report.puts += 1
    except PeerdError as error:
        node.note("put failed", str(error))


async def get(node: Node, name: str, report: Report) -> None:
    try:
        found = await node.dht.get(Key.of(name))
    except PeerdError as error:
        found = []
        node.note("get failed", str(error))
    if node.up:
        report.gets += 1
        report.gets_found += bool(found)


async def simulate(options: argparse.Namespace) -> Report:
    def line(rng: random.Random) -> SimLine:
        return SimLine(
            latency_s=rng.uniform(0.2, 1.0) * options.latency_ms / 1000,
            jitter_s=0.1 * options.latency_ms / 1000,
            up_mbit_s=options.mbit,
            down_mbit_s=4 * options.mbit,
            loss=options.loss,
        )

    config = WorldConfig(net=NetConfig(link_life_s=options.link_life_s), line=line)
    world = World(options.seed, swarm() if options.dht else hosts(), config)
    report = Report(options.hosts, options.seed)
    async with world.running():
        first = await world.start("boot")
        world.bootstrap.append(first.full_addr)
        for _ in range(options.hosts - 1):
            node = await world.start()
            await node.host.connect_addr(first.full_addr)
        acquaint(world)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pinging, world, report, options.every_s)
            if options.dht:
                nursery.start_soon(records, world, report, options.every_s)
            nursery.start_soon(introductions, world)
            await world.churn(Churn(share=options.churn, within_s=options.seconds * 0.9, spare=frozenset({"boot"})))
            await trio.sleep_until(max(options.seconds, trio.current_time()))
            nursery.cancel_scope.cancel()
        report.virtual_s = trio.current_time()
        report.left = world.trace.counts["kill"]
    finish(world, report)
    return report


def acquaint(world: World) -> None:
    """Give each living node the addresses of all others, as a DHT or an operator would."""
    for node in world.living():
        for other in world.living():
            if other is not node:
                node.host.learn(other.id, [other.addr])


async def introductions(world: World) -> None:
    known = len(world.nodes)
    while True:
        await trio.sleep(1)
        if len(world.nodes) != known:
            known = len(world.nodes)
            acquaint(world)


def finish(world: World, report: Report) -> None:
    times_ms = sorted(1000 * took_s for took_s in report.times_s)
    if times_ms:
        report.ping_median_ms = round(statistics.median(times_ms), 1)
        report.ping_99_ms = round(times_ms[int(0.99 * (len(times_ms) - 1))], 1)
    report.megabytes = round(sum(node.sent_bytes for node in world.net.nodes.values()) / 1e6, 2)
    report.events = world.trace.counts.total()
    report.trace = world.trace.hash()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=60, help="virtual time after the start (default 60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--churn", type=float, default=0.2, help="share of the nodes replaced on the way (default 0.2)")
    parser.add_argument("--every-s", type=float, default=5, help="mean time between a node's pings (default 5)")
    parser.add_argument("--latency-ms", type=float, default=40, help="most that one line adds, one way (default 40)")
    parser.add_argument("--mbit", type=float, default=50, help="uplink of a node; the downlink has four times as much")
    parser.add_argument("--loss", type=float, default=0.0, help="probability that a packet is lost (default 0)")
    parser.add_argument("--link-life-s", type=float, default=float("inf"), help="mean life of a connection")
    parser.add_argument("--dht", action="store_true", help="run the DHT too, and put and get records")
    add_json(parser)
    options = parser.parse_args()
    if options.hosts < 2:
        parser.error("--hosts: a swarm has at least 2")
    started = time.perf_counter()
    report = run_virtual(simulate, options, seed=options.seed)
    report.wall_s = round(time.perf_counter() - started, 2)
    shown = {name: value for name, value in asdict(report).items() if name != "times_s"}
    show(shown, options.json)


if __name__ == "__main__":
    main()
