"""Experiment on the event simulator: do look-ups in a DHT under churn find the stored values, in how many messages?

A DHT in its steady state stores values. Then a fraction of its nodes is killed and replaced by new ones over some time,
during which look-ups run. Uses the daemon's own Kademlia code.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from peerd.core.errors import LocalError
from peerd.core.ids import Key
from peerd.dht.node import messages as q
from tests.worlds.simulation.heapsim import HeapNode, HeapSim, HeapSimConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ChurnPlan:
    """Plan of a churn experiment. Times in virtual seconds."""

    nodes: int = 1000
    replaced: float = 0.2  # fraction of nodes, over the whole time
    values: int = 100
    lookups: int = 600
    seconds: float = 60.0
    ttl_s: float = 3000.0


@dataclass(frozen=True, slots=True)
class ChurnReport:
    """Result of a churn experiment. Look-ups of nodes that were killed before the end do not count."""

    seed: int
    lookups: int
    succeeded: int
    messages_per_lookup: float
    lookup_ms_median: float
    lookup_ms_95: float
    copies: float  # mean number of holders of a value right after it was stored
    messages: int  # in total, including maintenance
    events: int
    trace: str

    @property
    def success(self) -> float:
        return self.succeeded / self.lookups

    def __str__(self) -> str:
        return (
            f"{self.succeeded} of {self.lookups} look-ups found their value ({self.success:.2%}), "
            f"{self.messages_per_lookup:.1f} messages each, {self.lookup_ms_median:.0f} ms "
            f"(95 %: {self.lookup_ms_95:.0f} ms); {self.messages} messages in all; seed {self.seed}, trace {self.trace}"
        )


def measure_churn(seed: int, plan: ChurnPlan | None = None, config: HeapSimConfig | None = None) -> ChurnReport:
    """Run the experiment. The same seed gives the same report."""
    plan = plan or ChurnPlan()
    sim, rng = HeapSim(seed, config), random.Random(f"{seed}/churn")
    sim.settle(plan.nodes)
    sim.run(1.0)
    keys = [Key.of(f"value {number}") for number in range(plan.values)]
    copies = [_store(sim, rng.choice(sim.living()), key, plan.ttl_s) for key in keys]
    lookups: list[tuple[HeapNode, Key, int]] = []

    def replace() -> None:
        victim = rng.choice(sim.living())
        sim.kill(victim)
        sim.add(rng.choice(sim.living()))

    def look_up() -> None:
        joined = [node for node in sim.living() if node.kad.node.joined]  # the real service waits until it has joined
        node, key = rng.choice(joined), rng.choice(keys)
        lookups.append((node, key, sim.start(node, lambda op: q.Get(op, (key,)))))

    begin = sim.now
    for at, action in _schedule(plan, replace, look_up):
        sim.run(begin + at)
        action()
    counted = [(key, sim.finish(op)) for node, key, op in lookups if node.alive]
    found = [
        isinstance(o.done, q.GetDone) and [r.value for r in o.done.records[key]] == [key.raw] for key, o in counted
    ]
    millis = sorted(outcome.seconds * 1000 for _, outcome in counted)
    counts = [node.kad.node.counts for node in sim.nodes]
    return ChurnReport(
        seed,
        len(counted),
        sum(found),
        sum(count.searched_peers for count in counts) / max(1, sum(count.searches for count in counts)),
        statistics.median(millis),
        millis[int(0.95 * (len(millis) - 1))],
        statistics.mean(copies),
        sim.messages,
        sim.events,
        sim.trace_hash(),
    )


def _store(sim: HeapSim, node: HeapNode, key: Key, ttl_s: float) -> int:
    """Store a value, which is the key itself; returns the number of holders."""
    outcome = sim.finish(sim.start(node, lambda op: q.Put(op, key, b"", key.raw, ttl_s)))
    if not isinstance(outcome.done, q.PutDone):
        raise LocalError(f"a Put ended as {outcome.done}")
    return outcome.done.peers


def _schedule(
    plan: ChurnPlan, replace: Callable[[], None], look_up: Callable[[], None]
) -> Iterator[tuple[float, Callable[[], None]]]:
    """Times at which to call `replace` and `look_up`, each kind spread evenly, in order of time."""
    deaths = round(plan.replaced * plan.nodes)
    events = [(plan.seconds * (i + 0.5) / deaths, 0, replace) for i in range(deaths)]
    events += [(plan.seconds * (i + 0.5) / plan.lookups, 1, look_up) for i in range(plan.lookups)]
    for at, _, action in sorted(events, key=lambda event: event[:2]):
        yield at, action


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Plan of an experiment in which a fraction `gone` of the nodes is killed at once after all values are stored."""

    nodes: int = 1000
    gone: float = 0.2
    values: int = 200
    lookups: int = 10_000
    at_once: int = 50  # concurrent look-ups, each by another node


def measure_loss(seed: int, plan: Loss, config: HeapSimConfig | None = None) -> float:
    """Fraction of look-ups that find their value after many nodes were killed, before others have noticed that."""
    sim, rng = HeapSim(seed, config), random.Random(f"{seed}/loss")
    sim.settle(plan.nodes, lazily=True)
    sim.run(1.0)
    keys = [Key.of(f"value {number}") for number in range(plan.values)]
    for key in keys:
        _store(sim, rng.choice(sim.living()), key, 3000.0)
    for node in rng.sample(sim.nodes, round(plan.gone * plan.nodes)):
        sim.kill(node)
    found = 0
    for start in range(0, plan.lookups, plan.at_once):
        readers = rng.sample(sim.living(), min(plan.at_once, plan.lookups - start))
        asked = [(key, _look_up(sim, reader, key)) for reader in readers for key in [rng.choice(keys)]]
        for key, op in asked:
            done = sim.finish(op).done
            found += isinstance(done, q.GetDone) and [r.value for r in done.records[key]] == [key.raw]
    return found / plan.lookups


def _look_up(sim: HeapSim, node: HeapNode, key: Key) -> int:
    return sim.start(node, lambda op: q.Get(op, (key,)))
