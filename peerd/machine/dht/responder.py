"""Answers of a DHT node to others' requests, from its table, store and cached copies.

If a key has more records than the requester wants, every publisher gets its share (see `Store.get`).

Hostile input: requests for many large keys (the answer stops at `DHT_BYTES_PER_KEY`, and the first key always fits),
floods of records (the store's quotas), or records that belong elsewhere (refused if we know k nearer peers). The number
of keys and records in a request is bounded by the decoder.
"""

from __future__ import annotations

from peerd.core.ids import Key, PeerId
from peerd.core.limits import DHT_BYTES_PER_KEY, DHT_CONTACTS_PER_REPLY
from peerd.core.record import Record
from peerd.machine.budget.book import User
from peerd.machine.dht.hot_keys import HotKeys
from peerd.machine.dht.messages import Asked, Find, Found, Hello, Stored, StoreRecords
from peerd.machine.dht.neighbours import Neighbours
from peerd.machine.dht.routing_table import Contact, place
from peerd.machine.dht.store import Store as RecordStore
from peerd.machine.dht.store import Verdict, answer_bytes, is_large


class Responder:
    """Answers requests for `own` from its `neighbours`, its `store` and its copies of hot keys (`hot`)."""

    def __init__(self, own: PeerId, k: int, neighbours: Neighbours, store: RecordStore, hot: HotKeys) -> None:
        self._place = place(own.key)
        self._k = k
        self._neighbours = neighbours
        self._store = store
        self._hot = hot

    def find(self, now: float, wall: float, asker: PeerId, request: Find, hello: Hello | None) -> Found:
        """Records under as many of the keys as fit, and peers near any of them."""
        contacts: dict[bytes, Contact] = {}
        per_key = max(2, min(self._k, DHT_CONTACTS_PER_REPLY // len(request.keys)))
        records: list[tuple[Record, ...]] = []
        named: list[tuple[bytes, ...]] = []
        room, has = DHT_BYTES_PER_KEY, frozenset(request.has)
        for key in request.keys:
            held = self._held(now, wall, key, request) if request.values else ()
            tags = {record: record.tag for record in held if is_large(record)} if has else {}
            sent = tuple(record for record in held if tags.get(record) not in has)
            size = sum(map(answer_bytes, sent))
            if records and size > room:
                break
            room -= size
            records.append(sent)
            named.append(tuple(tag for tag in tags.values() if tag in has))
            near = self._neighbours.closest(now, place(key), per_key + 1)
            others = [contact for contact in near if contact.peer.raw != asker.raw]
            contacts |= {contact.peer.raw: contact for contact in others[:per_key]}
        near_any = tuple(contacts.values())[:DHT_CONTACTS_PER_REPLY]
        return Found(tuple(records), near_any, hello, tuple(named) if any(named) else ())

    def _held(self, now: float, wall: float, key: Key, request: Find) -> tuple[Record, ...]:
        held = self._store.get(wall, key, request.most_bytes)
        if not held and request.max_age_s:
            held = self._hot.get(now, wall, key, request.max_age_s, request.most_bytes)
        return tuple(held)

    def store(self, now: float, wall: float, asked: Asked, request: StoreRecords, hello: Hello | None) -> Stored:
        """A verdict for each record; after a forged one the rest are refused without a check."""
        verdicts: list[tuple[Verdict, int]] = []
        forged = self._neighbours.is_liar(now, asked.peer)
        sender = User(asked.peer.text, *asked.where)
        for record in request.records:
            verdict = (Verdict.FORGED, 0) if forged else self.keep(now, wall, record, sender)
            forged = verdict[0] is Verdict.FORGED
            verdicts.append(verdict)
        return Stored(tuple(verdicts), hello)

    def keep(self, now: float, wall: float, record: Record, sender: User) -> tuple[Verdict, int]:
        """Offer `record` to our own store, unless it belongs to others."""
        if self.is_far(now, record.key):
            return Verdict.FAR, 0
        return self._store.offer(wall, record, sender)

    def is_far(self, now: float, key: Key) -> bool:
        """Return True if k known peers are nearer to `key` than we are."""
        target = place(key)
        nearest = self._neighbours.closest(now, target, self._k)
        return len(nearest) == self._k and nearest[-1].place ^ target < self._place ^ target
