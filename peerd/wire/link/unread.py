"""Limits on unread bytes in the streams of all links; beyond them, streams are reset.

yamux grants each stream its initial window unconditionally. A peer may open hundreds of streams and fill them, while
their handlers do not read because they are busy, perhaps due to the same peer. So unread bytes are counted: if a link
exceeds its limit, its fullest stream is reset; if all links together exceed theirs, the fullest stream of the fullest
link of the fullest place (address block). Windows beyond the initial ones have their own budget (`WindowBudget`) and do
not count here. Invariant: between two counts a link receives at most UNREAD_LOOK_BYTES. Hostile input: many streams,
links, identities.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from peerd.core.ids import PeerId
from peerd.core.limits import UNREAD_LOOK_BYTES, WINDOW_BYTES_INITIAL
from peerd.wire.budget.book import User
from peerd.wire.link.link_stream import Stream

_log = logging.getLogger("peerd.wire")


class Filled(Protocol):
    """The part of a link that this module uses."""

    peer: PeerId
    user: User

    @property
    def streams(self) -> Iterable[Stream]: ...


class Unread:
    """Counts the unread bytes in all streams of one host, and resets streams beyond the limits."""

    def __init__(self, link_bytes: int, host_bytes: int) -> None:
        self._link_bytes, self._host_bytes = link_bytes, host_bytes
        self._held: dict[Filled, int] = {}  # at the last count
        self.total_bytes = 0

    def look(self, link: Filled) -> int:
        """Count the unread bytes of `link` and reset streams if needed; returns the bytes it may receive until the next
        call.
        """
        while self._count(link) > self._link_bytes:
            self._reset_fullest(link)
        while self.total_bytes > self._host_bytes:
            fullest = self._fullest()
            if self._count(fullest) <= 0 or self.total_bytes <= self._host_bytes:
                continue  # its handlers have read in the meantime
            self._reset_fullest(fullest)
        return UNREAD_LOOK_BYTES

    def gone(self, link: Filled) -> None:
        """Remove a link that has ended."""
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
        _log.warning("too many unread bytes of peer %s: resetting %s with %d bytes", link.peer, stream, _unread(stream))
        stream.reset()


def _unread(stream: Stream) -> int:
    mux = stream.mux
    held = mux.inbox_bytes + mux.held.bytes if mux.held is not None else mux.inbox_bytes
    return min(held, WINDOW_BYTES_INITIAL)
