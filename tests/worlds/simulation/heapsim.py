"""Event simulator of a DHT: thousands of nodes on one event heap, without trio, sockets or codecs.

Runs the daemon's own `Kademlia` objects. The network has a random round trip for each pair of peers, dead peers that
are silent or refuse connections, and churn. Signatures are replaced by a cheap hash that still differs for each
publisher. Every event is part of the trace hash: the same seed gives the same hash. Hand-shakes, encryption and codecs
take no time, so results only include round trips and timeouts, which dominate over the internet.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

from peerd.core.errors import LocalError
from peerd.core.ids import Key, PeerId
from peerd.core.record import Verifier
from peerd.dht.node import messages as q
from peerd.dht.node.kademlia import Kademlia
from peerd.dht.node.node_state import KademliaConfig
from peerd.dht.node.routing_table import KEY_BITS, Contact

_NORMAL = NormalDist()
EPOCH_S = 1_800_000_000.0  # Unix time at virtual time 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeapSimConfig:
    """The simulated network and its nodes; times in seconds."""

    round_trip_s: float = 0.092  # mean between two peers; Learning@home measured 92 +- 32 ms
    round_trip_spread_s: float = 0.032  # standard deviation between pairs
    refusing: float = 0.5  # fraction of dead peers that refuse at once; the others are silent
    clients: float = 0.0  # fraction of nodes that cannot be dialed
    skew_s: float = 0.0  # maximum error of clocks, in either direction
    node: KademliaConfig = field(default_factory=KademliaConfig)


class StandInSigner:
    """A signer that uses a keyed hash: as specific to publisher and content as a signature, at 1 % of its cost."""

    def __init__(self, public_key: bytes) -> None:
        self.peer_id = PeerId.from_public_key(public_key)

    def sign(self, data: bytes, /) -> bytes:
        return stand_in_signature(self.peer_id, data)


def stand_in_signature(peer: PeerId, data: bytes) -> bytes:
    """Signature of `data` by this peer's `StandInSigner`."""
    return hashlib.blake2b(data, key=peer.public_key).digest()


def stand_in_verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Verify a signature of `StandInSigner`; for `Verifier`."""
    return signature == stand_in_signature(peer, data)


class HeapNode:
    """One simulated node with its Kademlia state."""

    def __init__(self, kad: Kademlia, number: int) -> None:
        self.kad = kad
        self.number = number
        self.alive = True
        self.refuses = True  # once dead, it refuses connections rather than being silent
        self.wakes_at = float("inf")
        self.knows_round_trips = True
        self.to_settle: list[Contact] | None = None  # contacts from which its table will be filled at first use
        self.answers: Callable[[HeapNode, PeerId, q.Request], q.Reply | None] | None = None  # replaces `kad`'s answers

    @property
    def contact(self) -> Contact:
        return self.kad.node.contact


def _place(contact: Contact) -> int:
    return contact.place


@dataclass(frozen=True, slots=True)
class OperationOutcome:
    """Result of an operation, and its duration in virtual seconds."""

    done: q.GetDone | q.PutDone
    seconds: float


class HeapSim:
    """A network of nodes in virtual time; `run` advances to a time, `finish` to the end of an operation."""

    def __init__(self, seed: int | str, config: HeapSimConfig | None = None) -> None:
        self.config = config or HeapSimConfig()
        self.seed = seed
        self.now = 0.0
        self.nodes: list[HeapNode] = []
        self.events = 0
        self.messages = 0
        self._rng = random.Random(f"{seed}/network")
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._by_id: dict[PeerId, HeapNode] = {}
        self._ops: dict[int, float] = {}  # operation -> start time
        self._outcomes: dict[int, OperationOutcome] = {}
        self._last_op = 0
        self._trace = hashlib.blake2b(digest_size=16)

    def trace_hash(self) -> str:
        """Hash of all events so far, 32 hex digits."""
        return self._trace.hexdigest()

    def add(self, bootstrap: HeapNode | None = None) -> HeapNode:
        """Add a node that joins through `bootstrap`."""
        number = len(self.nodes)
        rng = random.Random(f"{self.seed}/node/{number}")
        signer = StandInSigner(rng.randbytes(32))
        kad = Kademlia(signer, Verifier(stand_in_verify), rng, self.config.node)
        if rng.random() >= self.config.clients:
            host = bytes([rng.randrange(11, 100), *rng.randbytes(3)])  # public addresses of many networks
            kad.addrs = (b"\x04" + host + b"\x06\x0f\xa1",)
        kad.node.clock_ahead_s = EPOCH_S + self.config.skew_s * rng.uniform(-1, 1)
        node = HeapNode(kad, number)
        self.nodes.append(node)
        self._by_id[signer.peer_id] = node
        if bootstrap is not None:
            self._do(node, kad.handle(self.now, q.Met(bootstrap.contact)))
        self._schedule_wake(node)
        return node

    def grow(self, count: int, every_s: float = 0.05) -> None:
        """Add `count` nodes, one every `every_s` seconds, each through a random live node."""
        for _ in range(count):
            dialable = [node for node in self.living() if node.contact.addrs]
            self.add(self._rng.choice(dialable) if dialable else None)
            self.run(self.now + every_s)

    def settle(self, count: int, *, lazily: bool = False) -> None:
        """Add `count` nodes in a steady state: each bucket of each routing table has up to k random contacts.

        `lazily`: fill a table only when its node is first used; ten thousand filled tables take a gigabyte.
        """
        nodes = [self.add() for _ in range(count)]
        contacts = sorted((node.contact for node in nodes if node.contact.addrs), key=_place)
        for node in nodes:
            node.kad.settled(self.now)
            if lazily:
                node.to_settle = contacts
            else:
                self._fill_table(node, contacts, self._rng)
                node.knows_round_trips = False

    def _fill_table(self, node: HeapNode, contacts: list[Contact], rng: random.Random) -> None:
        table = node.kad.node.neighbours.table
        own, left, right = node.contact.place, 0, len(contacts)  # contacts[left:right] share a prefix with us
        for bit in reversed(range(KEY_BITS)):
            if right - left <= 1:
                break
            middle = bisect_left(contacts, own >> bit << bit | 1 << bit, left, right, key=_place)
            ours, others = ((middle, right), (left, middle)) if own >> bit & 1 else ((left, middle), (middle, right))
            bucket = range(*others)
            for index in rng.sample(bucket, min(len(bucket), table.room(bit + 1))):
                table.add(self.now, contacts[index])
            left, right = ours

    def _settled(self, node: HeapNode) -> Kademlia:
        """The node's Kademlia, with its table filled."""
        if node.to_settle is not None:
            contacts, node.to_settle = node.to_settle, None
            self._fill_table(node, contacts, random.Random(f"{self.seed}/table/{node.number}"))
            node.knows_round_trips = False
        return node.kad

    def _experienced(self, node: HeapNode) -> Kademlia:
        """The node's Kademlia, with measured round trips for all contacts of a table that `settle` filled."""
        kad = self._settled(node).node
        if not node.knows_round_trips:
            node.knows_round_trips = True
            for contact in kad.neighbours.table:
                kad.round_trips.answered(contact.peer, self.round_trip(node, self._by_id[contact.peer]))
        return node.kad

    def kill(self, node: HeapNode) -> None:
        """Kill a node abruptly. By chance, it then refuses connections or is silent."""
        node.alive = False
        node.refuses = self._rng.random() < self.config.refusing
        self._note("kill", node.number)

    def living(self) -> list[HeapNode]:
        """All nodes that were not killed, oldest first."""
        return [node for node in self.nodes if node.alive]

    def start(self, node: HeapNode, command: Callable[[int], q.Input]) -> int:
        """Start an operation on a node: `command` makes its input from the operation's number, which is returned."""
        self._last_op += 1
        self._ops[self._last_op] = self.now
        self._do(node, self._experienced(node).handle(self.now, command(self._last_op)))
        self._schedule_wake(node)
        return self._last_op

    def finish(self, op: int, limit_s: float = 120.0) -> OperationOutcome:
        """Run until the operation has ended. Raises LocalError if it does not within `limit_s`."""
        end = self.now + limit_s
        while op not in self._outcomes:
            if not self._heap or self._heap[0][0] > end:
                raise LocalError(f"operation {op} did not end within {limit_s} s")
            self._step()
        return self._outcomes.pop(op)

    def run(self, until: float) -> None:
        """Process events up to virtual time `until`."""
        while self._heap and self._heap[0][0] <= until:
            self._step()
        self.now = max(self.now, until)

    def round_trip(self, one: HeapNode, other: HeapNode) -> float:
        """Round trip of a pair in seconds; constant, and equal in both directions."""
        pair = f"{self.seed}/{min(one.number, other.number)}/{max(one.number, other.number)}"
        share = int.from_bytes(hashlib.blake2b(pair.encode(), digest_size=6).digest(), "big") + 0.5
        draw = self.config.round_trip_s + self.config.round_trip_spread_s * _NORMAL.inv_cdf(share / (1 << 48))
        return max(draw, self.config.round_trip_s / 10)

    def nearest(self, key: Key, count: int) -> list[HeapNode]:
        """The `count` live, dialable nodes nearest to `key`: the correct result of a look-up."""
        dialable = [node for node in self.living() if node.contact.addrs]
        return sorted(dialable, key=lambda node: key.distance(node.kad.node.id.key))[:count]

    # --- events ------------------------------------------------------------------------------------------------

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action))

    def _step(self) -> None:
        self.now, _, action = heapq.heappop(self._heap)
        self.events += 1
        action()

    def _note(self, what: str, *numbers: int) -> None:
        self._trace.update(f"{self.now:.9f} {what} {numbers}\n".encode())

    def _schedule_wake(self, node: HeapNode) -> None:
        at = node.kad.wake_at(self.now)
        if at < node.wakes_at:
            node.wakes_at = at
            self._at(at, lambda: self._wake(node, at))

    def _wake(self, node: HeapNode, at: float) -> None:
        if not node.alive or node.wakes_at != at:
            return
        node.wakes_at = float("inf")
        self._do(node, node.kad.wake(self.now))
        self._schedule_wake(node)

    def _do(self, node: HeapNode, outputs: list[q.Output]) -> None:
        for output in outputs:
            match output:
                case q.Ask():
                    self._send(node, output)
                case q.GetDone(op) | q.PutDone(op):
                    self._outcomes[op] = OperationOutcome(output, self.now - self._ops.pop(op))
                    self._note("done", node.number, op)
                case q.BlamePeer():
                    self._note("blame", node.number)
                case q.Respond():
                    raise LocalError("an answer without a request")

    def _send(self, node: HeapNode, ask: q.Ask) -> None:
        self.messages += 1
        other = self._by_id.get(ask.contact.peer)
        if other is None:  # invented by a hostile node
            self._at(self.now + self.config.node.silent_s, lambda: self._input(node, q.AskFailed(ask.id)))
            return
        half = self.round_trip(node, other) / 2
        self._note("ask", node.number, other.number)
        self._at(self.now + half, lambda: self._arrive(node, other, ask, half))

    def _arrive(self, node: HeapNode, other: HeapNode, ask: q.Ask, half: float) -> None:
        if not other.alive or not other.contact.addrs:
            patience = half if other.refuses else max(half, self.config.node.silent_s - half)
            self._at(self.now + patience, lambda: self._input(node, q.AskFailed(ask.id)))
            return
        if other.answers is not None:
            self._pretend(node, other, ask, half)
            return
        reply: q.Reply | None = None
        outputs = self._settled(other).handle(self.now, q.Asked(0, node.kad.node.id, ask.request))
        for output in outputs:
            if isinstance(output, q.Respond):
                reply = output.reply
        self._do(other, [output for output in outputs if not isinstance(output, q.Respond)])
        self._schedule_wake(other)
        if reply is not None:
            answer = q.Answered(ask.id, reply)
            self._at(self.now + half, lambda: self._input(node, answer))

    def _pretend(self, node: HeapNode, other: HeapNode, ask: q.Ask, half: float) -> None:
        """Answer by `other.answers`, for a hostile node; if that returns None, the request times out."""
        reply = other.answers(other, node.kad.node.id, ask.request) if other.answers is not None else None
        event: q.Input = q.Answered(ask.id, reply) if reply is not None else q.AskFailed(ask.id)
        patience = half if reply is not None else max(half, self.config.node.silent_s - half)
        self._at(self.now + patience, lambda: self._input(node, event))

    def _input(self, node: HeapNode, event: q.Input) -> None:
        if node.alive:
            self._do(node, node.kad.handle(self.now, event))
            self._schedule_wake(node)
