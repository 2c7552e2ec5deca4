"""Experiment on the event simulator: the load of a popular key in a large DHT, and the cost of its look-ups.

A DHT in its steady state stores one value, which many nodes read, each once. The report has the number of requests per
look-up to the holders of the key, for the last third of the readers.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from peerd.core.ids import Key
from peerd.dht.node import messages as q
from tests.worlds.simulation.dht_hostile import HostileNodes
from tests.worlds.simulation.heapsim import HeapNode, HeapSim, HeapSimConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class HotPlan:
    """Plan of the experiment. `max_age_s`: maximum age of copies that the readers accept, in seconds."""

    nodes: int = 1000
    readers: int = 600
    every_s: float = 0.1
    max_age_s: int = 60
    hostile: float = 0.0  # fraction of nodes


@dataclass(frozen=True, slots=True)
class HotReport:
    """Result for the last third of the readers; `success` and `copied` are for all."""

    success: float
    asked_per_lookup: float
    mean_ms: float
    holders_asked: float  # requests to the key's holders per look-up
    busiest: float  # requests to the busiest node per look-up
    copied: int  # look-ups that nodes on the path made to get a copy


def measure_hot(seed: int, plan: HotPlan, config: HeapSimConfig | None = None) -> HotReport:
    """Read one key from many nodes. The same seed gives the same report."""
    sim, rng = HeapSim(seed, config), random.Random(f"{seed}/plan")
    sim.settle(plan.nodes, lazily=True)
    hostile = rng.sample(sim.nodes, round(plan.hostile * plan.nodes))
    HostileNodes(sim, hostile, seed)
    honest = [node for node in sim.nodes if node.answers is None]
    sim.run(1.0)
    key = Key.of(f"hot {seed}")
    publisher = rng.choice(honest)
    sim.finish(sim.start(publisher, lambda op: q.Put(op, key, b"", b"hot", 3000.0)))
    sim.run(5.0)
    holders = {node.number for node in sim.nearest(key, sim.config.node.copies)}
    readers = rng.sample([n for n in honest if n is not publisher and n.number not in holders], plan.readers)
    begun: list[tuple[HeapNode, int]] = []
    last = readers[-(plan.readers // 3) :]
    before: list[int] = []
    for reader in readers:
        if reader is last[0]:
            before = [node.kad.node.counts.served for node in sim.nodes]
        begun.append((reader, sim.start(reader, lambda op: q.Get(op, (key,), 0, plan.max_age_s))))
        sim.run(sim.now + plan.every_s)
    outcomes = [(reader, sim.finish(op)) for reader, op in begun]
    served = [node.kad.node.counts.served - count for node, count in zip(sim.nodes, before, strict=True)]
    found = [
        isinstance(outcome.done, q.GetDone)
        and any(r.publisher == publisher.kad.node.id and r.value == b"hot" for r in outcome.done.records[key])
        for _, outcome in outcomes
    ]
    counts = [reader.kad.node.counts for reader in last]
    return HotReport(
        success=statistics.fmean(found),
        asked_per_lookup=sum(c.searched_peers for c in counts) / sum(c.searches for c in counts),
        mean_ms=1000 * statistics.fmean(outcome.seconds for _, outcome in outcomes[-len(last) :]),
        holders_asked=sum(served[number] for number in holders) / len(last),
        busiest=max(served) / len(last),
        copied=sum(node.kad.node.counts.copied for node in honest),
    )
