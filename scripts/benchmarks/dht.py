"""DHT with up to 10,000 peers: finding the best experts for a batch, lookups after churn, store and get on loopback.

The first two run the daemon's state machines in the heap simulator, in virtual time with round trips of 92 +- 32 ms.
`cold` is the time until a reader without cached lookups knows the top-4 experts of 64 samples: the larger of the means
for a 32 x 32 and a 256 x 256 grid. `messages` are the peers asked for each prefix, as if each lookup ran alone. `warm`
is the time of the same search with cached prefixes. Store and get are real: 32 nodes in this process, each
with its own host, over TCP on loopback.
"""

from __future__ import annotations

import random
import statistics
import time

import numpy as np
import trio

from peerd.core.addr import parse_addr
from peerd.core.ids import Key
from peerd.dht.dht import Dht
from scripts.benchmarks._remote_process import new_stack
from scripts.benchmarks._report import Figure, Report
from tests.worlds.simulation.dht_churn import Loss, measure_loss
from tests.worlds.simulation.dht_grid import GridPlan, GridReport, GridSwarm

TARGETS_MS = {100: 120.0, 1000: 200.0, 10_000: 260.0}
PAPER_MS = {100: 317, 1000: 528, 10_000: 764}  # Learning@home, section 4.1
NODES = 32
SIDE, BATCH, K = 256, 64, 4


def _cold(full: bool) -> tuple[list[list[Figure]], dict[str, float], float]:
    """Sections of figures, the cold time by number of nodes, and the largest mean of peers asked per lookup."""
    sections, cold, most = [], dict[str, float](), 0.0
    for nodes, target in TARGETS_MS.items():
        swarm = GridSwarm(1, GridPlan(nodes=nodes, readers=(16 if full else 8) if nodes < 10_000 or full else 4))
        reports = [swarm.read(side) for side in swarm.plan.sides]
        cold[str(nodes)] = max(report.mean_ms for report in reports)
        most = max(most, *(report.asked_per_lookup for report in reports))
        text = f"{nodes:,} nodes (paper: {PAPER_MS[nodes]} ms)"
        told = f"top-4 of 64 samples, cold, {text}"
        section = [Figure(f"cold_ms_{nodes}", told, cold[str(nodes)], "ms", 0, at_most=target)]
        sections.append(section + [figure for report in reports for figure in _details(nodes, report)])
    return sections, cold, most


def _details(nodes: int, report: GridReport) -> list[Figure]:
    grid, key = f"{report.side} x {report.side}", f"{nodes}_{report.side}"
    return [
        Figure(f"mean_ms_{key}", f"  {grid}: mean of {len(report.cold_ms)} readers", report.mean_ms, "ms", 0),
        Figure(f"worst_ms_{key}", f"  {grid}: slowest reader", max(report.cold_ms), "ms", 0),
        Figure(f"asked_{key}", f"  {grid}: peers asked for each prefix", report.asked_per_lookup, digits=1),
        Figure(f"sent_{key}", f"  {grid}: messages for each prefix, shared", report.messages_per_lookup, digits=1),
        Figure(f"missed_{key}", f"  {grid}: records not found", report.missed, digits=0, at_most=0),
    ]


def _warm_ms() -> float:
    """Median time of a beam search over two dimensions with all prefixes cached."""
    rng = np.random.default_rng(1)
    first, second = rng.standard_normal((2, BATCH, SIDE), dtype=np.float32)
    alive = rng.random((SIDE, SIDE)) < 0.9
    took = []
    for _ in range(20):
        began = time.perf_counter()
        _top(first, second, alive)
        took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took)


def _top(first: np.ndarray, second: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Coordinates [samples, k, 2] of the k live experts with the best sums, within the best k rows that have any."""
    rows = np.argsort(np.where(alive.any(1), -first, np.inf), axis=1)[:, :K]
    scores = np.take_along_axis(first, rows, 1)[:, :, None] + second[:, None, :]
    scores = np.where(alive[rows], scores, -np.inf).reshape(len(first), -1)
    best = np.argpartition(-scores, K, axis=1)[:, :K]
    return np.stack((np.take_along_axis(rows, best // SIDE, 1), best % SIDE), axis=2)


async def _loopback(repeats: int) -> tuple[float, float]:
    """Median milliseconds of a store and of a get, each by a random node and of a new key."""
    rng = random.Random(1)
    async with trio.open_nursery() as nursery:
        nodes: list[Dht] = []
        entry = []
        for number in range(NODES):
            stack = new_stack(number)
            await nursery.start(stack.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
            dht = Dht(stack.host, stack.rpc, stack.clock, stack.keypair)
            await nursery.start(dht.run, entry)
            entry = entry or [stack.host.addrs()[0].encapsulate(f"/p2p/{stack.host.id}")]
            nodes.append(dht)
        for dht in nodes:
            dht.look_around()
        with trio.fail_after(60.0):
            for dht in nodes:
                await dht.get(Key.of(f"the way to {id(dht)}"))  # creates connections, as in a swarm that runs for long
        stores, gets = [], []
        for number in range(repeats):
            key = Key.of(f"value {number}")
            stores.append(await _timed(lambda k=key: rng.choice(nodes).put(k, k.raw, ttl_s=600.0)))
            gets.append(await _timed(lambda k=key: rng.choice(nodes).get(k)))
        nursery.cancel_scope.cancel()
    return 1000 * statistics.median(stores), 1000 * statistics.median(gets)


async def _timed(operation: object) -> float:
    began = time.perf_counter()
    if not await operation():  # type: ignore[operator]
        raise RuntimeError("a store reached nobody, or a get found nothing")
    return time.perf_counter() - began


def measure(full: bool) -> Report:
    """Run the benchmark, which takes about three minutes; with `full`, twice as long."""
    store_ms, get_ms = trio.run(_loopback, 400 if full else 150)
    sections, cold, most = _cold(full)
    loss = measure_loss(1, Loss(lookups=10_000 if full else 3000))
    sections += [
        [
            Figure("warm_ms", "the same, prefixes read before", _warm_ms(), "ms", at_most=5.0),
            Figure("messages", "peers asked for each prefix, cold, at most", most, digits=1, at_most=8.0),
            Figure("success_after_churn", "20 % of nodes gone since: found", loss, digits=4, at_least=0.999),
        ],
        [
            Figure("store_ms", f"store, loopback, {NODES} nodes (hivemind: 27.5 ms)", store_ms, "ms", at_most=10.0),
            Figure("get_ms", f"get, loopback, {NODES} nodes (hivemind: 4.8 ms)", get_ms, "ms", at_most=3.0),
        ],
    ]
    note = "cold: virtual time, round trips 92 +- 32 ms, without hand-shakes; store and get: real, median"
    return Report("directory", sections, note, {"cold_ms": {nodes: round(ms, 1) for nodes, ms in cold.items()}})
