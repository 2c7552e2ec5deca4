"""Unread bytes in the streams of all links, and the streams that are reset when there are too many.

The window that every stream begins with is granted unasked (yamux has it so); a peer may open hundreds of streams, fill
each, and wait for handlers that do not read, because they are busy or because it makes them be. So the bytes are
counted, and where a link holds more than its share the fullest of its streams is reset; where all links together hold
too much, that of the fullest link of the fullest place. Windows beyond the first have a budget of their own
(`WindowBudget`) and do not count here.
Invariant: between two looks a link takes UNREAD_LOOK_BYTES at most. Hostile input: many streams, links, identities.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from peerd.core.ids import PeerId
from peerd.core.limits import UNREAD_LOOK_BYTES, WINDOW_BYTES_INITIAL
from peerd.machine.budget.book import User
from peerd.net.link.stream import Stream

_log = logging.getLogger("peerd.net")


class Filled(Protocol):
    """A link, as far as it matters here."""

    peer: PeerId
    user: User

    @property
    def streams(self) -> Iterable[Stream]: ...


class Unread:
    """The unread bytes of one host."""

    def __init__(self, link_bytes: int, host_bytes: int) -> None:
        self._link_bytes, self._host_bytes = link_bytes, host_bytes
        self._held: dict[Filled, int] = {}  # as of the last look
        self.total_bytes = 0

    def look(self, link: Filled) -> int:
        """Count anew what `link` holds, and make room; returns how many bytes it may receive until the next look."""
        while self._count(link) > self._link_bytes:
            self._reset_fullest(link)
        while self.total_bytes > self._host_bytes:
            fullest = self._fullest()
            if self._count(fullest) <= 0 or self.total_bytes <= self._host_bytes:
                continue  # its handlers have read meanwhile
            self._reset_fullest(fullest)
        return UNREAD_LOOK_BYTES

    def gone(self, link: Filled) -> None:
        """The link has ended."""
        self.total_bytes -= self._held.pop(link, 0)

    def _count(self, link: Filled) -> int:
        held = sum(map(_unread, link.streams))
        self.total_bytes += held - self._held.get(link, 0)
        self._held[link] = held
        return held

    def _fullest(self) -> Filled:
        places: Counter[str] = Counter()
        for link, held in self._held.items():
            places[link.user.place] += held
        worst = places.most_common(1)[0][0]
        return max((link for link in self._held if link.user.place == worst), key=self._held.__getitem__)

    def _reset_fullest(self, link: Filled) -> None:
        stream = max(link.streams, key=_unread)
        _log.warning("peer %s fills what nobody reads: %s is reset with %d bytes", link.peer, stream, _unread(stream))
        stream.reset()


def _unread(stream: Stream) -> int:
    mux = stream.mux
    held = mux.inbox_bytes + mux.held.bytes if mux.held is not None else mux.inbox_bytes
    return min(held, WINDOW_BYTES_INITIAL)
