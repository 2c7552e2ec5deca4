"""Replication to newcomers near a record's key: by us, if we are the nearest that has it.

Our own records we always give ourselves. A store may hold tens of thousands of keys, so they are gone through in
slices: `step` looks at a few and says what it found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from peerd.core.ids import Key, PeerId
from peerd.machine.dht.neighbours import Neighbours
from peerd.machine.dht.routing_table import Contact, place

_KEYS_PER_STEP = 16  # each costs a search of the table; together well below a millisecond
_NEWCOMERS = 256  # at once; who comes later gets its records when they are renewed


class Replication:
    """Work that newcomers make. Holds keys and contacts only."""

    def __init__(self, own: PeerId, copies: int) -> None:
        self._place = place(own.key)
        self._copies = copies
        self._queue: deque[tuple[Contact, deque[Key]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def newcomer(self, contact: Contact, keys: Iterable[Key]) -> None:
        """`contact` has just got a seat; look through `keys`."""
        pending = deque(keys)
        if pending and len(self._queue) < _NEWCOMERS:
            self._queue.append((contact, pending))

    def step(self, now: float, neighbours: Neighbours) -> list[tuple[Contact, Key, bool]]:
        """A few keys further: (newcomer, key, whether we are the one that gives it what others published)."""
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
