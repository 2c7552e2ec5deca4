"""The running tasks of a DHT node: what a command starts, what follows from its searches, and what is reported.

Get: search, collect and report records; the nearest peer that lacked some is sent a copy. Copy: the same for ourselves,
for a key that others often ask for. Put: search (unless a recent search is known) and store copies on the nearest
peers, including ourselves if we are one; if a peer holds a later version of our record, from before a restart, publish
an even later one. Every task ends with one report, or none if nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.ids import Key
from peerd.core.limits import DHT_LARGE_BYTES
from peerd.core.record import Record
from peerd.dht.node import messages as q
from peerd.dht.node.key_search import KeySearch, Placement, Task
from peerd.dht.node.lookup import Lookup, LookupGuide, LookupRule
from peerd.dht.node.node_state import NodeState
from peerd.dht.node.pending_requests import PendingRequests
from peerd.dht.node.routing_table import KEY_BITS, Contact, place
from peerd.dht.node.store import answer_bytes, is_large

_ATTEMPTS = 3  # to supersede versions that others claim to hold
_LARGE_KEYS: Final = 256


class LargeRecords:
    """Large records found by earlier reads, by key, so that peers need not send them again.

    Otherwise a stranger that fills a key with large records costs its readers these bytes at every read. This is not a
    cache of answers: a record counts only if a peer reports that it holds it. Keeps at most DHT_LARGE_BYTES, for the
    keys read last.
    """

    def __init__(self) -> None:
        self._by_key = BoundedDict[Key, list[Record]](_LARGE_KEYS)

    def of(self, key: Key, wall: float) -> list[Record]:
        """The unexpired large records that were under `key` when it was last read."""
        return [record for record in self._by_key.get(key, ()) if record.is_live(wall)]

    def keep(self, key: Key, records: Iterable[Record]) -> None:
        """Store the large ones of the records found under `key`."""
        self._by_key.pop(key, None)
        if large := list(filter(is_large, records)):
            self._by_key[key] = large
        while self.bytes_kept > DHT_LARGE_BYTES:
            self._by_key.popitem(last=False)

    @property
    def bytes_kept(self) -> int:
        return sum(answer_bytes(record) for records in self._by_key.values() for record in records)


class QueryPool:
    """Runs the commands of a DHT node as tasks. `emit` is called with each output."""

    def __init__(self, node: NodeState, dispatch: PendingRequests, emit: Callable[[q.Output], None]) -> None:
        self._node = node
        self._dispatch = dispatch
        self._emit = emit
        self._tasks: list[Task] = []
        self._large = LargeRecords()
        config = node.config
        self._value_rule = LookupRule(
            want=config.copies,
            enough=config.enough,
            spare=config.spare,
            doubt=1,
            roots=config.enough + 1,
            parallel=config.parallel,
            slow_s=config.slow_s,
            silent_s=config.silent_s,
        )
        # On the way to a hot key, the first peers that are asked may suffice.
        self._copy_rule = replace(self._value_rule, approach=config.enough, anywhere=True)
        # Each of the nearest peers knows its neighbourhood: a few together know all peers that should hold the record.
        self._place_rule = replace(self._value_rule, want=config.enough + 1, patient=False)
        self._refresh_rule = replace(self._value_rule, want=2, enough=2, parallel=2, patient=False)
        self._join_rule = replace(self._value_rule, want=config.k, patient=False)

    def __len__(self) -> int:
        return len(self._tasks)

    def get(self, now: float, op: int, keys: Iterable[Key], most_bytes: int, max_age_s: int) -> None:
        """Collect the records under `keys`, up to `most_bytes` of a key per answer (0: no limit).

        Cached copies up to the age `max_age_s` are accepted.
        """
        rule = self._copy_rule if max_age_s else self._value_rule
        searches = [
            self._search(now, key, rule, values=True, most_bytes=most_bytes, max_age_s=max_age_s)
            for key in dict.fromkeys(keys)
        ]
        self._start(now, Task(op, "get", searches))

    def copy(self, now: float, keys: Iterable[Key]) -> None:
        """Look up keys that others often ask for, to cache their records."""
        for key in keys:
            self._node.counts.copied += 1
            self._start(now, Task(None, "copy", [self._search(now, key, self._value_rule, values=True)]))

    def put(self, now: float, op: int | None, records: Sequence[Record], attempt: int = 1) -> None:
        """Store our `records` on the peers nearest to their keys."""
        by_key: dict[Key, list[Record]] = {}
        for record in records:
            by_key.setdefault(record.key, []).append(record)
        known = [key for key in by_key if self._node.neighbours.near_is_fresh(now, key)]
        searches = [self._search(now, key, self._place_rule, values=False) for key in by_key if key not in known]

        def then(search: KeySearch) -> list[Placement]:
            contacts = search.lookup.nearest(self._node.config.k)
            return [self._placement(now, record, contacts) for record in by_key[search.key]]

        task = Task(op, "put", searches, then=then, attempt=attempt)
        for key in known:
            target = place(key)
            contacts = [*self._node.neighbours.seeds(now, key, target), *self._ourselves()]
            contacts.sort(key=lambda contact: contact.place ^ target)
            task.placements += [self._placement(now, record, contacts) for record in by_key[key]]
        self._start(now, task)

    def give(self, now: float, contact: Contact, records: Sequence[Record]) -> None:
        """Offer copies to one peer; nobody waits for the result."""
        placements = [
            Placement(record, [contact], 1, patience_s=self._node.round_trips.patience_s) for record in records
        ]
        self._start(now, Task(None, "put", placements=placements))

    def join(self, now: float) -> None:
        """Find our own neighbours, so that they know us and we know them."""
        self._start(now, Task(None, "join", [self._search(now, self._node.id.key, self._join_rule, values=False)]))

    def refresh(self, now: float, keys: Iterable[Key]) -> None:
        """Look up some keys, to learn which peers are near them."""
        for key in keys:
            self._start(now, Task(None, "refresh", [self._search(now, key, self._refresh_rule, values=False)]))

    def stop(self, now: float, op: int) -> None:
        """Report the results so far. Searches end; placements in progress continue."""
        for task in [task for task in self._tasks if task.op == op]:
            self._report(now, task, "the deadline passed")
            task.op = None
            if task.kind == "get":
                self._tasks.remove(task)

    def pump(self, now: float, tasks: Iterable[Task] | None = None, touched: Collection[int] | None = None) -> None:
        """Send the requests of these tasks (or of all), and finish those that are done. A task may be listed twice.

        `touched`: ids of the searches with new answers, if the others need no check.
        """
        named = list(self._tasks if tasks is None else {id(task): task for task in tasks}.values())
        tasks = [task for task in named if task in self._tasks]
        for ask in self._dispatch.messages(now, tasks, self._node.hello, touched):
            self._node.counts.asks += 1
            self._emit(ask)
        for task in [task for task in tasks if task.done]:
            self._tasks.remove(task)
            self._finish(now, task)

    def wake_at(self) -> float | None:
        """Time at which `pump` must be called for all tasks even without an answer."""
        return min((at for task in self._tasks if (at := task.wake_at()) is not None), default=None)

    def _start(self, now: float, task: Task) -> None:
        self._tasks.append(task)
        self.pump(now, [task])

    def _search(
        self, now: float, key: Key, rule: LookupRule, *, values: bool, most_bytes: int = 0, max_age_s: int = 0
    ) -> KeySearch:
        node, target = self._node, place(key)
        node.neighbours.table.searched(now, target)
        own, guide = next(iter(self._ourselves()), None), LookupGuide(node.round_trips, self._radius(now))
        lookup = Lookup(target, node.neighbours.seeds(now, key, target), rule, own, guide)
        held = node.store.get(node.wall(now), key, most_bytes) if values else []
        lookup.found = bool(held)
        had = [*self._large.of(key, node.wall(now)), *filter(is_large, held)] if values else []
        return KeySearch(key, lookup, values=values, held=held, had=had, most_bytes=most_bytes, max_age_s=max_age_s)

    def _radius(self, now: float) -> int:
        """The distance from a key within which its holders probably are, estimated from our own nearest neighbours."""
        node, k = self._node, self._node.config.k
        nearest = node.neighbours.closest(now, node.contact.place, k)
        if len(nearest) < k:
            return 1 << KEY_BITS  # every peer is a holder
        return max(1, (nearest[-1].place ^ node.contact.place) // k * node.config.copies)

    def _is_beyond(self, now: float, contact: Contact, key: Key) -> bool:
        """Return True if a peer is too far from `key` to store others' records under it."""
        config = self._node.config
        return (place(key) ^ contact.place) * config.copies > 2 * config.k * self._radius(now)

    def bits_beyond(self, now: float, key: Key) -> int:
        """Number of bits by which we are farther from `key` than its probable holders."""
        return int(((place(key) ^ self._node.contact.place) // self._radius(now)).bit_length())

    def _ourselves(self) -> list[Contact]:
        """Ourselves as a contact, if we can be dialed: we are a candidate like any other."""
        return [self._node.contact] if self._node.contact.addrs else []

    def _placement(self, now: float, record: Record, contacts: Sequence[Contact]) -> Placement:
        node = self._node
        among_nearest = node.id in (contact.peer for contact in contacts[: node.config.copies])
        held = int(among_nearest and node.keep(now, record))
        others = [contact for contact in contacts if contact.peer != node.id]
        return Placement(record, others, node.config.copies, patience_s=node.round_trips.patience_s, held=held)

    def _finish(self, now: float, task: Task) -> None:
        node = self._node
        for search in task.searches:
            node.neighbours.found_near(now, search.key, search.lookup.nearest(node.config.k))
            if task.op is not None:
                node.counts.searches += 1
                node.counts.searched_peers += search.lookup.asked
        if task.kind == "copy":
            for search in task.searches:
                records = search.live(node.wall(now), node.publisher.own(node.wall(now), search.key))
                node.hot.keep(now, search.key, records, self.bits_beyond(now, search.key))
        node.joined |= task.kind == "join" and len(node.neighbours.table) > 0
        if task.kind == "put" and self._outbid(now, task):
            return
        self._report(now, task, "; ".join(dict.fromkeys(search.lookup.why or "" for search in task.searches)))
        if task.kind == "get":
            self._repair(now, task)

    def _report(self, now: float, task: Task, why: str) -> None:
        if task.op is None:
            return
        if task.kind == "get":
            wall, publisher = self._node.wall(now), self._node.publisher
            records = {s.key: s.live(wall, publisher.own(wall, s.key)) for s in task.searches}
            for search in task.searches:
                if search.was_answered:
                    self._large.keep(search.key, records[search.key])
            answered = all(search.was_answered for search in task.searches)
            self._emit(q.GetDone(task.op, records, why, answered))
        else:
            refusals = tuple(verdict for placement in task.placements for verdict in placement.refusals)
            peers = min((placement.holders for placement in task.placements), default=0)
            self._emit(q.PutDone(task.op, peers, why, refusals))

    def _outbid(self, now: float, task: Task) -> bool:
        """If peers hold a later version of our record, publish an even later one in a new task, which then reports."""
        beaten = [placement for placement in task.placements if placement.newest]
        if not beaten or task.attempt >= _ATTEMPTS:
            return False
        wall, publisher = self._node.wall(now), self._node.publisher
        anew = [publisher.outbid(wall, placement.record, placement.newest) for placement in beaten]
        later = [record for record in anew if record is not None]
        if not later:
            return False
        unbeaten = [p.record for p in task.placements if not p.newest] if task.op is not None else []
        self.put(now, task.op, [*later, *unbeaten], task.attempt + 1)
        return True

    def _repair(self, now: float, task: Task) -> None:
        """Send the nearest peers the records that they lacked, in one message each."""
        gifts: dict[Contact, list[Record]] = {}
        for search in task.searches:
            lacking = search.lacking(self._node.wall(now))
            if lacking is None or self._is_beyond(now, lacking[0], search.key):
                continue  # it may have answered from a cached copy; it would refuse the records
            if self._node.neighbours.may_give(now, lacking[0].peer, search.key):
                gifts.setdefault(lacking[0], []).extend(lacking[1])
        for contact, records in gifts.items():
            self.give(now, contact, records)
