"""Experiment on the event simulator: do look-ups in a large DHT with hostile nodes still find honest peers' records?

There are three kinds of hostile nodes, in equal numbers. Liars answer each request with other hostile nodes and
non-existent peers, and without records. Silent ones never answer. Flooders answer with as many records as fit into an
answer, under the requested key, signed by their own identity. Liars and flooders accept records and store none.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from peerd.core.ids import Key, PeerId
from peerd.core.limits import DHT_BYTES_PER_KEY
from peerd.core.record import Record
from peerd.dht.node import messages as q
from peerd.dht.node.routing_table import Contact
from peerd.dht.node.store import Verdict, answer_bytes
from tests.worlds.simulation.heapsim import EPOCH_S, HeapNode, HeapSim, HeapSimConfig, StandInSigner

_ADDRS = (b"\x04\x0b\x01\x01\x01\x06\x0f\xa1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostilePlan:
    """Plan of the experiment."""

    nodes: int = 1000
    share: float = 0.2
    values: int = 100
    lookups: int = 500
    at_once: int = 25  # concurrent look-ups, each by another node


@dataclass(frozen=True, slots=True)
class HostileReport:
    """Share of successful look-ups, peers asked per look-up, and the slowest look-up."""

    success: float
    asked_per_lookup: float
    slowest_s: float


class HostileNodes:
    """Hostile nodes that cooperate; replaces the answers of the given nodes."""

    def __init__(self, sim: HeapSim, nodes: list[HeapNode], seed: int) -> None:
        self._sim = sim
        self._rng = random.Random(f"{seed}/hostile")
        self._contacts = [node.contact for node in nodes]
        self._signer = StandInSigner(self._rng.randbytes(32))
        kinds = (self._lie, self._keep_silent, self._flood)
        for number, node in enumerate(nodes):
            node.answers = kinds[number % len(kinds)]

    def _lie(self, node: HeapNode, asker: PeerId, request: q.Request) -> q.Reply:
        if isinstance(request, q.Find):
            invented = [Contact(PeerId.from_public_key(self._rng.randbytes(32)), _ADDRS) for _ in range(10)]
            target = request.keys[0]
            mates = sorted(self._contacts, key=lambda contact: target.distance(contact.peer.key))[:20]
            return q.Found(((),) * len(request.keys), (*mates, *invented), _hello(node, request))
        return self._take(node, request)

    def _keep_silent(self, node: HeapNode, asker: PeerId, request: q.Request) -> None:
        return None

    def _flood(self, node: HeapNode, asker: PeerId, request: q.Request) -> q.Reply:
        if isinstance(request, q.Find) and request.values:
            return q.Found((self._junk(request.keys[0]),), tuple(self._contacts[:64]), _hello(node, request))
        return self._lie(node, asker, request)

    def _junk(self, key: Key) -> tuple[Record, ...]:
        """Validly signed but useless records, as many as fit into one answer."""
        records, room = list[Record](), DHT_BYTES_PER_KEY
        expires_ms = round((EPOCH_S + self._sim.now + 600.0) * 1000)
        for number in range(DHT_BYTES_PER_KEY >> 14):
            record = Record(key, self._signer.peer_id, b"%d" % number, bytes(16 << 10), 1 + number, expires_ms)
            if answer_bytes(record) <= room:
                records.append(record.signed(self._signer))
                room -= answer_bytes(record)
        return tuple(records)

    def _take(self, node: HeapNode, request: q.Request) -> q.Reply:
        if isinstance(request, q.StoreRecords):
            stored = tuple((Verdict.STORED, record.version) for record in request.records)
            return q.Stored(stored, _hello(node, request))
        return q.PongReply(_hello(node, request))


def _hello(node: HeapNode, request: q.Request) -> q.Hello | None:
    return q.Hello(node.contact.addrs) if request.hello is not None else None


def measure_hostile(seed: int, plan: HostilePlan, config: HeapSimConfig | None = None) -> HostileReport:
    """Run the experiment; hostile nodes are in all routing tables. The same seed gives the same report."""
    sim, rng = HeapSim(seed, config), random.Random(f"{seed}/plan")
    sim.settle(plan.nodes, lazily=True)
    hostile = rng.sample(sim.nodes, round(plan.share * plan.nodes))
    HostileNodes(sim, hostile, seed)
    honest = [node for node in sim.nodes if node.answers is None]
    sim.run(1.0)
    keys = [Key.of(f"value {number}") for number in range(plan.values)]
    publishers: dict[Key, PeerId] = {}
    for key in keys:
        node = rng.choice(honest)
        publishers[key] = node.kad.node.id
        sim.finish(sim.start(node, lambda op, k=key: q.Put(op, k, b"", k.raw, 3000.0)))  # type: ignore[misc]
    found, slowest_s = 0, 0.0
    for start in range(0, plan.lookups, plan.at_once):
        readers = rng.sample(honest, min(plan.at_once, plan.lookups - start))
        asked = [(key, _look_up(sim, reader, key)) for reader in readers for key in [rng.choice(keys)]]
        for key, op in asked:
            outcome = sim.finish(op)
            slowest_s = max(slowest_s, outcome.seconds)
            records = outcome.done.records[key] if isinstance(outcome.done, q.GetDone) else []
            found += any(r.publisher == publishers[key] and r.value == key.raw for r in records)
    counts = [node.kad.node.counts for node in honest]
    peers, searches = sum(c.searched_peers for c in counts), sum(c.searches for c in counts)
    return HostileReport(found / plan.lookups, peers / max(1, searches), slowest_s)


def _look_up(sim: HeapSim, node: HeapNode, key: Key) -> int:
    return sim.start(node, lambda op: q.Get(op, (key,)))
