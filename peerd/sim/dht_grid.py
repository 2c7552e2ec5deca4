"""Look-ups of a grid of experts in a large directory, on the heap simulator (Learning@home, sections 3.2 and 4.1).

A settled swarm; hosts announce what lives below each prefix of the first dimension, one record per host and prefix.
A reader that has read nothing yet wants the best experts for each sample of a batch: it ranks the first coordinates,
and reads the prefixes of the best in one operation; those of dead prefixes are replaced by the next in rank. The last
dimension needs no look-up. Virtual time counts round trips and waiting; hand-shakes and processors are not in it.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from peerd.core.errors import LocalError
from peerd.core.experts.grid import Uid, bitmap, coordinates_in, prefix_key
from peerd.core.ids import Key
from peerd.core.messages.encoding import decode, encode
from peerd.core.messages.experts import Announced, Name
from peerd.core.record import Record
from peerd.machine.dht import messages as q
from peerd.sim.heapsim import HeapNode, HeapSim, HeapSimConfig

RUN = "benchmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """Plan of the experiment."""

    nodes: int = 1000
    sides: Sequence[int] = (32, 256)  # of square grids, each announced and read
    hosts: int = 2  # of one prefix, each with its share of what lives there
    dead: float = 0.0  # of the prefixes, how many nobody announces
    readers: int = 8  # of each grid, one after the other
    batch: int = 64
    k: int = 4
    max_age_s: int = 0  # of copies that will do for the readers


@dataclass(slots=True)
class GridReport:
    """Result for one grid."""

    side: int
    cold_ms: list[float] = field(default_factory=list)  # of each reader's batch
    lookups: int = 0  # prefixes looked up
    asked: int = 0  # peers asked, each look-up counted by itself
    messages: int = 0  # sent, of which one may serve several look-ups
    missed: int = 0  # records that live and were not found

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.cold_ms)

    @property
    def asked_per_lookup(self) -> float:
        return self.asked / max(1, self.lookups)

    @property
    def messages_per_lookup(self) -> float:
        return self.messages / max(1, self.lookups)


class GridSwarm:
    """A settled swarm that announces experts, and readers of it."""

    def __init__(self, seed: int, plan: GridPlan, config: HeapSimConfig | None = None) -> None:
        self.plan = plan
        self.sim = HeapSim(seed, config)
        self._rng = random.Random(f"{seed}/grid")
        self.sim.settle(plan.nodes, lazily=True)
        self.sim.run(1.0)
        self._hosts: dict[tuple[int, int], int] = {}  # side and row -> records announced
        for side in plan.sides:
            self._announce(side)
        self.sim.run(self.sim.now + 10.0)

    def _announce(self, side: int) -> None:
        """One put for each prefix and host; all hosts at once."""
        ops = []
        for row in range(side):
            alive = self._rng.random() >= self.plan.dead
            hosts = self._rng.sample(self.sim.nodes, self.plan.hosts) if alive else []
            self._hosts[side, row] = len(hosts)
            for share, host in enumerate(hosts):
                value = announcement(side, row, range(share, side, len(hosts)))
                ops.append(self.sim.start(host, _put(key_of(side, row), value)))
        for op in ops:
            self.sim.finish(op)

    def read(self, side: int) -> GridReport:
        """Each of the plan's readers has a batch of its own; none has read before."""
        report = GridReport(side)
        free = [node for node in self.sim.living() if node.answers is None]
        for reader in self._rng.sample(free, self.plan.readers):
            self._read_batch(reader, report)
            self.sim.run(self.sim.now + 5.0)
        return report

    def _read_batch(self, reader: HeapNode, report: GridReport) -> None:
        side, plan, counts = report.side, self.plan, reader.kad.node.counts
        ranks = [self._rng.sample(range(side), side) for _ in range(plan.batch)]
        found: dict[int, set[int]] = {}
        began, asked, messages = self.sim.now, counts.searched_peers, counts.asks
        while wanted := next_rows(ranks, found, plan.k):
            keys = {row: key_of(side, row) for row in wanted}
            outcome = self.sim.finish(self.sim.start(reader, _get(keys.values(), plan.max_age_s)))
            if not isinstance(outcome.done, q.GetDone):
                raise LocalError(f"a Get ended as {outcome.done}")
            for row, key in keys.items():
                records = outcome.done.records[key]
                report.missed += self._hosts[side, row] - len(records)
                found[row] = coordinates_of(records)
            report.lookups += len(keys)
        report.cold_ms.append(1000 * (self.sim.now - began))
        report.asked += counts.searched_peers - asked
        report.messages += counts.asks - messages


def _put(key: Key, value: bytes) -> Callable[[int], q.Input]:
    return lambda op: q.Put(op, key, b"", value, 3000.0)


def _get(keys: Iterable[Key], max_age_s: int) -> Callable[[int], q.Input]:
    wanted = tuple(keys)
    return lambda op: q.Get(op, wanted, 0, max_age_s)


def key_of(side: int, row: int) -> Key:
    """Key of the prefix `row` in the first layer of a grid of this side."""
    return prefix_key(f"{RUN}/{side}", Uid(0, (row,)))


def announcement(side: int, row: int, below: Iterable[int]) -> bytes:
    """What a host announces that serves the experts `below` one row, some updates old."""
    served = list(below)
    addrs = ["/ip4/203.0.113.7/tcp/4001"]
    return encode(Announced(Name(0, [row]), bitmap(served, side), [1] * len(served), [500] * len(served), 0.05, addrs))


def coordinates_of(records: Iterable[Record]) -> set[int]:
    """The coordinates that live by all of these records together."""
    return {c for record in records for c in coordinates_in(decode(Announced, record.value).below)}


def next_rows(ranks: Sequence[Sequence[int]], found: dict[int, set[int]], k: int) -> list[int]:
    """Rows to read next: those of each sample's best `k` live ones that nobody has read; none when all are known."""
    wanted: dict[int, None] = {}
    for rank in ranks:
        alive = (row for row in rank if row not in found or found[row])
        wanted |= {row: None for row, _ in zip(alive, range(k), strict=False) if row not in found}
    return list(wanted)
