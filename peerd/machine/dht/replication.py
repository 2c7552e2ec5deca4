"""Replication to newcomers near a record's key, by the nearest peer that has the record.

We always send our own records ourselves. A store may hold tens of thousands of keys, so they are processed in slices:
`step` checks a few and returns what to send.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from peerd.core.ids import Key, PeerId
from peerd.machine.dht.neighbours import Neighbours
from peerd.machine.dht.routing_table import Contact, place

_KEYS_PER_STEP = 16  # each costs a search of the table; together well below a millisecond
_NEWCOMERS = 256  # in the queue; further newcomers get their records when these are renewed


class Replication:
    """The queue of newcomers. Holds only keys and contacts."""

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
