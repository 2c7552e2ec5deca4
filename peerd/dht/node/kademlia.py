"""A DHT node without a network: neighbours, store, own records and searches behind `handle(now, input) -> outputs`.

The daemon's service and the simulator both drive this object: they send each `Ask` and report its result, pass in
others' requests, and call `wake` at `wake_at`. This module connects the parts and does the node's maintenance: it
probes suspected peers, refreshes the table, renews its records and replicates records to newcomers.

Invariants: every Get, Put and Withdraw ends with exactly one Done output; every record in a GetDone is verified, live
and of the requested key; a peer that lied is not asked again for a while; stored data about others is bounded. Without
`addrs` nobody can dial us: then we store nothing for others and are in no routing table.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence

from peerd.core.ids import Key, PeerId
from peerd.core.record import Record, Signer, Verifier
from peerd.dht.node import messages as q
from peerd.dht.node.hot_keys import lifetime_s
from peerd.dht.node.neighbours import Neighbours
from peerd.dht.node.node_state import KademliaConfig, NodeState
from peerd.dht.node.pending_requests import PendingRequests
from peerd.dht.node.query_pool import QueryPool
from peerd.dht.node.routing_table import Contact, place
from peerd.dht.node.store import Verdict
from peerd.wire.budget.book import Book

_KEYS_PER_STEP = 16  # each costs a search of the table; together well below a millisecond
_NEWCOMERS = 256  # in the queue; further newcomers get their records when these are renewed


class Kademlia:
    """One Kademlia node. Pass it a `Met` for each connected peer; it then maintains itself."""

    def __init__(
        self,
        signer: Signer,
        verifier: Verifier,
        rng: random.Random,
        config: KademliaConfig | None = None,
        book: Book | None = None,
    ) -> None:
        """`book`: the host's account of resources, for records stored for others."""
        self.node = NodeState(signer, verifier, config or KademliaConfig(), book)
        self._rng = rng
        self._out: list[q.Output] = []
        self._dispatch = PendingRequests(self.node.id, self.node.neighbours, verifier)
        self._work = QueryPool(self.node, self._dispatch, self._out.append)
        self._handover = Replication(self.node.id, self.node.config.copies)
        self._upkeep_at = 0.0
        self._join_at = float("inf")  # set once a peer is met
        self._refreshed = False

    @property
    def addrs(self) -> tuple[bytes, ...]:
        """Our addresses, for others to dial."""
        return self.node.contact.addrs

    @addrs.setter
    def addrs(self, addrs: Sequence[bytes]) -> None:
        if tuple(addrs) != self.addrs:
            self.node.contact = Contact(self.node.id, tuple(addrs))
            self.node.neighbours.greet_all_again()

    def settled(self, now: float) -> None:
        """Skip the initial join and refresh, because the table was filled by other means."""
        self.node.joined = self._refreshed = True
        self._join_at = now + self.node.config.refresh_s * self._rng.random()

    def look_around(self, now: float) -> None:
        """Look up our neighbours at the next `wake`, which also sends them our current introduction."""
        self._join_at = self._upkeep_at = now

    def handle(self, now: float, event: q.Input) -> list[q.Output]:
        """Process an input; returns the outputs to carry out, in order."""
        match event:
            case q.Asked():
                self._serve(now, event)
            case q.Answered(ask, reply):
                self._answered(now, ask, reply)
            case q.AskFailed(ask, lied):
                self._failed(now, ask, lied)
            case q.Met(contact):
                self._ping(now, contact)
            case q.Lost(peer):
                self._lost(now, peer)
            case _:
                self._command(now, event)
        return self._taken()

    def wake(self, now: float) -> list[q.Output]:
        """Do the work that is due by time. Call it at `wake_at`; earlier calls are harmless."""
        if now >= self._upkeep_at:
            self._upkeep(now)
        renewal = self.node.publisher.due_at()
        if renewal is not None and renewal - self.node.clock_ahead_s <= now:  # rounds like wake_at
            self._work.put(now, None, self.node.publisher.due(max(renewal, self.node.wall(now))))
        if self._handover:
            self._hand_over(now)
        self._work.pump(now)
        return self._taken()

    def wake_at(self, now: float) -> float:
        """Latest time for the next call of `wake`."""
        if self._handover:
            return now
        times = [self._upkeep_at, self._work.wake_at(), self.node.publisher.due_at()]
        if times[2] is not None:
            times[2] -= self.node.clock_ahead_s
        return min(at for at in times if at is not None)

    def _taken(self) -> list[q.Output]:
        out = list(self._out)
        self._out.clear()
        return out

    def _command(self, now: float, command: q.Get | q.Put | q.Withdraw | q.Stop) -> None:
        publisher, wall = self.node.publisher, self.node.wall(now)
        match command:
            case q.Get(op, keys, most_bytes, max_age_s):
                self._work.get(now, op, keys, most_bytes, max_age_s)
            case q.Put(op, key, suffix, value, ttl_s, stays):
                self._work.put(now, op, [publisher.publish(wall, key, suffix, value, ttl_s, stays=stays)])
            case q.Withdraw(op, None):
                self._work.put(now, op, publisher.withdraw_all(wall))
            case q.Withdraw(op, Key() as key, suffix):
                tombstone = publisher.withdraw(wall, key, suffix)
                self._work.put(now, op, [tombstone] if tombstone is not None else [])
            case q.Stop(op):
                self._work.stop(now, op)

    # --- requests, answers, failures ---------------------------------------------------------------------------

    def _serve(self, now: float, asked: q.Asked) -> None:
        self.node.counts.served += 1
        request, wall, responder = asked.request, self.node.wall(now), self.node.responder
        hello = self.node.hello if request.hello is not None else None
        reply: q.Reply
        match request:
            case q.Find():
                reply = responder.find(now, wall, asked.peer, request, hello)
                self._work.copy(now, self._wished_for(now, asked, request, reply))
            case q.StoreRecords():
                reply = responder.store(now, wall, asked, request, hello)
                if any(verdict is Verdict.FORGED for verdict, _ in reply.verdicts):
                    self._blame(now, asked.peer, "it offered a record that its publisher did not sign")
            case q.Ping():
                reply = q.PongReply(hello)
        self._out.append(q.Respond(asked.token, reply))
        self._heard(now, asked.peer, Contact(asked.peer, request.hello.addrs) if request.hello is not None else None)

    def _wished_for(self, now: float, asked: q.Asked, request: q.Find, found: q.Found) -> list[Key]:
        """The requested keys that are now so popular that we should look them up and cache them."""
        if not (request.values and request.max_age_s):
            return []
        answered = enumerate(zip(request.keys, found.records, strict=False))
        lacking = (key for index, (key, records) in answered if not records and not found.named_of(index))
        wished = []
        for key in lacking:
            useful_s = min(lifetime_s(self._work.bits_beyond(now, key)), request.max_age_s)
            if self.node.hot.asked(now, key, asked.peer, asked.where[0], useful_s):
                wished.append(key)
        return wished

    def _answered(self, now: float, ask: int, reply: q.Reply) -> None:
        flight = self._dispatch.land(ask)
        if flight is None:
            return  # its connection closed first, and the searches were informed
        peer = flight.contact.peer
        self.node.round_trips.answered(peer, now - flight.asked_at)
        lie = self._dispatch.deliver(now, self.node.wall(now), flight, reply)
        if lie is not None:
            flight.failed()
            self._blame(now, peer, lie)
        elif reply.hello is not None:
            self._heard(now, peer, Contact(peer, reply.hello.addrs))
        else:
            neighbours = self.node.neighbours
            known = peer in neighbours.table or neighbours.has_resigned(peer)
            self._heard(now, peer, None if known else flight.contact)
        self._work.pump(now, flight.tasks(), flight.touched())

    def _failed(self, now: float, ask: int, lied: bool) -> None:
        flight = self._dispatch.land(ask)
        if flight is None:
            return
        self.node.counts.failed += 1
        peer = flight.contact.peer
        self.node.neighbours.ungreeted(peer)
        flight.failed()
        if lied:
            self._blame(now, peer, "its answer breaks the protocol")
        else:
            self._ping(now, self.node.neighbours.silent(now, peer))
        self._work.pump(now, flight.tasks(), flight.touched())

    def _lost(self, now: float, peer: PeerId) -> None:
        self.node.neighbours.lost(now, peer)
        flights = self._dispatch.land_all(peer)
        for flight in flights:
            self.node.counts.failed += 1
            flight.failed()
        self._work.pump(now, [task for flight in flights for task in flight.tasks()])

    def _heard(self, now: float, peer: PeerId, contact: Contact | None) -> None:
        """Record a message from the peer. `contact`: set if we also know addresses where it can be dialed."""
        neighbours = self.node.neighbours
        neighbours.answered(now, peer)
        if contact is not None and not contact.addrs:
            self._ping(now, neighbours.resigned(peer))
        if contact is None or not contact.addrs:
            return
        alone = not len(neighbours.table)
        seated, probe = neighbours.welcome(now, contact)
        self._ping(now, probe)
        if not seated:
            return
        keys = [record.key for record in self.node.publisher.all(self.node.wall(now))]
        if contact in neighbours.closest(now, self.node.contact.place, self.node.config.k):
            keys += self.node.store.keys()  # only neighbours may have to hold the keys near us as well
        self._handover.newcomer(contact, dict.fromkeys(keys))
        if alone:
            self._join_at = self._upkeep_at = now  # our first peer, or the first one after an outage

    def _blame(self, now: float, peer: PeerId, why: str) -> None:
        self.node.counts.lies += 1
        self._out.append(q.BlamePeer(peer, why))
        self._ping(now, self.node.neighbours.lied(now, peer))

    def _ping(self, now: float, contact: Contact | None) -> None:
        if contact is not None:
            asks = self._dispatch.ping(now, contact, self.node.hello)
            self.node.counts.asks += len(asks)
            self._out += asks

    # --- maintenance -------------------------------------------------------------------------------------------

    def _upkeep(self, now: float) -> None:
        config, neighbours = self.node.config, self.node.neighbours
        self._upkeep_at = now + config.upkeep_s * (0.9 + 0.2 * self._rng.random())  # so that nodes stay out of step
        self.node.store.purge(self.node.wall(now))
        self.node.hot.purge(now)
        for contact in neighbours.probes(now):
            self._ping(now, contact)
        if now >= self._join_at:
            small = len(neighbours.table) < config.k  # in a small swarm all nodes should know each other soon
            self._join_at = now + (config.neighbours_s if small else config.refresh_s)
            self._work.join(now)
        if len(neighbours.table) >= config.k:  # otherwise our neighbourhood is the whole network
            due = neighbours.table.refresh_due(now, config.refresh_s if self._refreshed else 0.0)
            self._refreshed = True
            self._work.refresh(now, [neighbours.table.key_in(index, self._rng) for index in due])

    def _hand_over(self, now: float) -> None:
        """Send newcomers the records they should hold, for a few more keys."""
        wall, gifts = self.node.wall(now), dict[Contact, list[Record]]()
        for contact, key, ours in self._handover.step(now, self.node.neighbours):
            records = self.node.publisher.own(wall, key)
            if ours:
                own = {record.sub_key for record in records}
                records += [record for record in self.node.store.get(wall, key) if record.sub_key not in own]
            gifts.setdefault(contact, []).extend(records)
        for contact, records in gifts.items():
            self._work.give(now, contact, records)


class Replication:
    """Replication to newcomers near a record's key, by the nearest peer that has the record.

    We always send our own records ourselves. A store may hold tens of thousands of keys, so they are processed in
    slices: `step` checks a few and returns what to send.
    """

    def __init__(self, own: PeerId, copies: int) -> None:
        self._place = place(own.key)
        self._copies = copies
        self._queue: deque[tuple[Contact, deque[Key]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def newcomer(self, contact: Contact, keys: Iterable[Key]) -> None:
        """Queue `contact`, which has just entered the table, with the `keys` to check for it."""
        pending = deque(keys)
        if pending and len(self._queue) < _NEWCOMERS:
            self._queue.append((contact, pending))

    def step(self, now: float, neighbours: Neighbours) -> list[tuple[Contact, Key, bool]]:
        """Check a few more keys; returns (newcomer, key, True if we are the peer that sends it others' records)."""
        found: list[tuple[Contact, Key, bool]] = []
        for _ in range(_KEYS_PER_STEP):
            if not self._queue:
                break
            contact, keys = self._queue[0]
            key = keys.popleft()
            if not keys:
                self._queue.popleft()
            target = place(key)
            nearest = neighbours.closest(now, target, self._copies)
            if contact.peer in (c.peer for c in nearest):
                others = (c for c in nearest if c.peer != contact.peer)
                ours = all(self._place ^ target < c.place ^ target for c in others)
                found.append((contact, key, ours))
        return found
