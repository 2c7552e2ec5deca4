"""Experiment on the event simulator: look-ups of a grid of experts in a large DHT (Learning@home, sections 3.2, 4.1).

In a DHT in its steady state, hosts announce their experts below each prefix of the first dimension, one record per host
and prefix. A reader with an empty cache searches the best experts for each sample of a batch: it ranks the first
coordinates and reads the prefixes of the best ones in one operation; prefixes without experts are replaced by the next
in rank. The last dimension needs no look-up. Virtual time includes round trips and timeouts, but no handshakes and no
computation.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from peerd.core.errors import LocalError
from peerd.core.ids import Key
from peerd.core.record import Record
from peerd.dht.node import messages as q
from peerd.messages.encoding import decode, encode
from peerd.messages.experts import Announced, Name
from peerd.run.grid import Uid, bitmap, coordinates_in, prefix_key
from tests.worlds.simulation.heapsim import HeapNode, HeapSim, HeapSimConfig

RUN = "benchmark"


@dataclass(frozen=True, slots=True, kw_only=True)
class GridPlan:
    """Size of the DHT and of the grids, and number of readers."""

    nodes: int = 1000
    sides: Sequence[int] = (32, 256)  # of square grids, each announced and read
    hosts: int = 2  # per prefix; each has an equal part of its experts
    dead: float = 0.0  # fraction of prefixes without experts
    readers: int = 8  # per grid, one after the other
    batch: int = 64
    k: int = 4
    max_age_s: int = 0  # of copies that the readers accept


@dataclass(slots=True)
class GridReport:
    """Result of all readers' look-ups in one grid."""

    side: int
    cold_ms: list[float] = field(default_factory=list)  # time of each reader's batch
    lookups: int = 0  # prefixes looked up
    asked: int = 0  # peers asked, summed over look-ups
    messages: int = 0  # sent; one may serve several look-ups
    missed: int = 0  # live records that were not found

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
    """A DHT in its steady state with announcements of experts, and the readers' look-ups."""

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
        """Put one record for each prefix and host, all concurrently."""
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
        """Look up one batch from each of the plan's readers, whose caches are empty."""
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
    """DHT key of the prefix `row` in the first layer of a grid with this side."""
    return prefix_key(f"{RUN}/{side}", Uid(0, (row,)))


def announcement(side: int, row: int, below: Iterable[int]) -> bytes:
    """The announcement of a host with the experts at the coordinates `below` in one row."""
    served = list(below)
    addrs = ["/ip4/203.0.113.7/tcp/4001"]
    return encode(Announced(Name(0, [row]), bitmap(served, side), [1] * len(served), [500] * len(served), 0.05, addrs))


def coordinates_of(records: Iterable[Record]) -> set[int]:
    """The union of the coordinates in these records."""
    return {c for record in records for c in coordinates_in(decode(Announced, record.value).below)}


def next_rows(ranks: Sequence[Sequence[int]], found: dict[int, set[int]], k: int) -> list[int]:
    """Rows to read next: the unread ones among each sample's best `k` rows that may be alive. Empty if all are read."""
    wanted: dict[int, None] = {}
    for rank in ranks:
        alive = (row for row in rank if row not in found or found[row])
        wanted |= {row: None for row, _ in zip(alive, range(k), strict=False) if row not in found}
    return list(wanted)
