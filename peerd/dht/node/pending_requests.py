"""The pending requests of a DHT node: combines what its tasks need from one peer, and distributes the answers.

An answer is accepted only as far as it can be checked: it must be of the requested kind, about the requested keys, and
not larger than requested, and every record must be signed by its publisher. Anything else is a lie, reported to the
caller as text. Does not decide which peers to ask or when to stop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

from peerd.core.ids import Key, PeerId
from peerd.core.limits import (
    DHT_KEYS_PER_CALL,
    DHT_RECORDS_PER_STORE,
    DHT_STORE_BYTES,
    DHT_TAGS_PER_CALL,
    RECORD_VALUE_BYTES,
)
from peerd.core.record import MAX_RECORD_BYTES, Record, Verifier
from peerd.dht.node import messages as q
from peerd.dht.node.key_search import KeySearch, Placement, Task
from peerd.dht.node.neighbours import Neighbours
from peerd.dht.node.routing_table import Contact
from peerd.dht.node.store import answer_bytes

_RECORD_BYTES = MAX_RECORD_BYTES - RECORD_VALUE_BYTES  # upper bound on a record's size without its value


@dataclass(slots=True)
class RequestInFlight:
    """A pending request, and the parts of tasks that wait for it; a ping has none."""

    contact: Contact
    request: q.Request
    searches: Sequence[tuple[Task, KeySearch]]
    placements: Sequence[tuple[Task, Placement]]
    asked_at: float = 0.0

    def tasks(self) -> list[Task]:
        """Tasks that this request serves."""
        return [task for task, _ in self.searches] + [task for task, _ in self.placements]

    def touched(self) -> set[int]:
        """Ids of the searches that this request serves."""
        return {id(search) for _, search in self.searches}

    def failed(self) -> None:
        """Inform the waiting parts that no answer will come."""
        for _, search in self.searches:
            search.failed(self.contact.peer)
        for _, placement in self.placements:
            placement.failed(self.contact.peer)


class PendingRequests:
    """The requests that peer `own` has sent and that are not answered yet."""

    def __init__(self, own: PeerId, neighbours: Neighbours, verifier: Verifier) -> None:
        self._own = own
        self._neighbours = neighbours
        self._verifier = verifier
        self._flights: dict[int, RequestInFlight] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._flights)

    def ping(self, now: float, contact: Contact, hello: q.Hello) -> list[q.Ask]:
        """Ping the peer, unless a ping to it is pending."""
        if contact.peer == self._own or any(
            flight.contact.peer == contact.peer and isinstance(flight.request, q.Ping)
            for flight in self._flights.values()
        ):
            return []
        self._neighbours.greets(now, contact.peer)
        return [self._ask(now, contact, q.Ping(hello))]

    def messages(
        self, now: float, tasks: Iterable[Task], hello: q.Hello, touched: Collection[int] | None = None
    ) -> Iterator[q.Ask]:
        """Messages that these tasks need sent now, one per peer and kind as far as they fit; see `Task.next`."""
        searches: dict[tuple[Contact, bool, int, int], list[tuple[Task, KeySearch]]] = {}
        placements: dict[Contact, list[tuple[Task, Placement]]] = {}
        for task in tasks:
            for contact, part in task.next(now, touched):
                if isinstance(part, KeySearch):
                    searches.setdefault((contact, part.values, part.most_bytes, part.max_age_s), []).append(
                        (task, part)
                    )
                else:
                    placements.setdefault(contact, []).append((task, part))
        for (contact, values, most_bytes, max_age_s), wanted in searches.items():
            by_key: dict[Key, list[tuple[Task, KeySearch]]] = {}
            for task, search in wanted:  # several tasks may need one key: request it only once
                by_key.setdefault(search.key, []).append((task, search))
            for keys in _chunks(tuple(by_key), DHT_KEYS_PER_CALL):
                parts = [part for key in keys for part in by_key[key]]
                find = q.Find(keys, values, self._greeting(now, contact, hello), most_bytes, max_age_s, _named(parts))
                yield self._ask(now, contact, find, searches=parts)
        for contact, placed in placements.items():
            for batch in _batches(placed):
                records = tuple(placement.record for _, placement in batch)
                store = q.StoreRecords(records, self._greeting(now, contact, hello))
                yield self._ask(now, contact, store, placements=batch)

    def land(self, ask: int) -> RequestInFlight | None:
        """Remove and return the pending request with this id, or None if it was settled before."""
        return self._flights.pop(ask, None)

    def land_all(self, peer: PeerId) -> list[RequestInFlight]:
        """Remove and return all pending requests to `peer`, because they are lost."""
        lost = [ask for ask, flight in self._flights.items() if flight.contact.peer == peer]
        return [self._flights.pop(ask) for ask in lost]

    def deliver(self, now: float, wall: float, flight: RequestInFlight, reply: q.Reply) -> str | None:
        """Pass the answer to the tasks that wait for it. Returns None, or the reason if the answer is a lie."""
        match flight.request, reply:
            case q.Find() as find, q.Found():
                return self._found(now, wall, flight, find, reply)
            case q.StoreRecords(records), q.Stored(verdicts) if len(records) == len(verdicts):
                for (_, placement), (verdict, version) in zip(flight.placements, verdicts, strict=True):
                    placement.answered(flight.contact.peer, verdict, version)
                return None
            case q.Ping(), q.PongReply():
                return None
        return "its answer does not match the request"

    def _found(self, now: float, wall: float, flight: RequestInFlight, find: q.Find, found: q.Found) -> str | None:
        if not 1 <= len(found.records) <= len(find.keys):
            return f"it answered {len(found.records)} keys of {len(find.keys)}"
        had: dict[Key, dict[bytes, Record]] = {}
        for _, search in flight.searches:
            had.setdefault(search.key, {}).update(search.has)
        if not {tag for tags in found.named for tag in tags} <= set(find.has):
            return "it named a record tag that was not in the request"
        told = {
            key: (*records, *(had[key][tag] for tag in dict.fromkeys(found.named_of(index)) if tag in had[key]))
            for index, (key, records) in enumerate(zip(find.keys, found.records, strict=False))
        }
        for search in {search.key: search for _, search in flight.searches}.values():
            if fault := self._fault(search, told.get(search.key, ())):
                return fault
        nearer = self._neighbours.believed(now, found.contacts)
        for _, search in flight.searches:
            if search.key in told:
                records = _acceptable(wall, told[search.key]) if search.values else ()
                search.answered(flight.contact, nearer, records)
            else:
                search.lookup.postponed(flight.contact.peer)
        return None

    def _fault(self, search: KeySearch, records: Sequence[Record]) -> str | None:
        """The reason why the records for one search are invalid, or None."""
        if any(record.key != search.key for record in records):
            return "it returned a record of another key"
        if sum(map(answer_bytes, records)) > search.answer_bytes:
            return "it returned more of a key than requested"
        if not all(self._verifier.genuine(record) for record in records):
            return "it returned a record that its publisher did not sign"
        return None

    def _greeting(self, now: float, contact: Contact, hello: q.Hello) -> q.Hello | None:
        return hello if self._neighbours.greets(now, contact.peer) else None

    def _ask(
        self,
        now: float,
        contact: Contact,
        request: q.Request,
        *,
        searches: Sequence[tuple[Task, KeySearch]] = (),
        placements: Sequence[tuple[Task, Placement]] = (),
    ) -> q.Ask:
        self._last_id += 1
        known = self._neighbours.table.contact(contact.peer) or contact  # the peer itself stated the table's addresses
        self._flights[self._last_id] = RequestInFlight(known, request, searches, placements, now)
        return q.Ask(self._last_id, known, request)


def _named(parts: Iterable[tuple[Task, KeySearch]]) -> tuple[bytes, ...]:
    """Tags of the records that the tasks have; if there are too many, those of the largest records, which save most."""
    has = {tag: answer_bytes(record) for _, search in parts for tag, record in search.has.items()}
    return tuple(nlargest(DHT_TAGS_PER_CALL, has, key=has.__getitem__))


def _acceptable(wall: float, records: Sequence[Record]) -> list[Record]:
    """The records that have not expired and whose lease is not longer than allowed."""
    return [record for record in records if record.is_timely(wall)]


def _chunks(keys: tuple[Key, ...], most: int) -> Iterator[tuple[Key, ...]]:
    return (keys[start : start + most] for start in range(0, len(keys), most))


def _batches(placed: list[tuple[Task, Placement]]) -> Iterator[list[tuple[Task, Placement]]]:
    """Batches of records, each as large as the limits of one message allow."""
    batch: list[tuple[Task, Placement]] = []
    room = DHT_STORE_BYTES
    for task, placement in placed:
        size = len(placement.record.value) + _RECORD_BYTES
        if batch and (size > room or len(batch) == DHT_RECORDS_PER_STORE):
            yield batch
            batch, room = [], DHT_STORE_BYTES
        batch.append((task, placement))
        room -= size
    if batch:
        yield batch
