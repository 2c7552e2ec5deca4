"""Failover: another path to a peer that is silent on the current one, before that link is declared dead.

A suspected link has some seconds to answer, since bulk data delays pings. If the path is dead, callers would wait for
all that time and then for a dial. So a suspected peer that stays silent is dialed again, over a relay if there is no
other path. Once there is another link, new streams use it, and the silent link times out early: a peer that answers on
one path but not to a ping on another is not reachable there. As the same cause may have cut off other peers, the peers
of all other silent links are pinged at the same time. A link on which the peer answers again is used as before.
Invariants: one search per link at a time, a bounded number of dials; without another path nothing changes.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import trio

from peerd.core.errors import Unreachable
from peerd.wire.host.dialer import Dialer
from peerd.wire.host.link_table import Links
from peerd.wire.link.link import Link

_log = logging.getLogger("peerd.wire")
_SILENT_S: Final = 1.0  # time to answer before another path is searched; longer for long round trips
_SILENT_RTTS: Final = 4
_ALL_AGAIN_S: Final = 1.0  # minimum interval of pinging all other links
_DIAL_S: Final = 4.0  # timeout of the dial, since a stuck dial would block new ones
_DIALS: Final = 16  # concurrent dials: if our own line is dead, all peers are silent


class Failover:
    """Searches for other paths to the silent peers of one host."""

    def __init__(self, links: Links, dialer: Dialer) -> None:
        self._links, self._dialer = links, dialer
        self._searches: set[Link] = set()
        self._dials = trio.Semaphore(_DIALS)
        self._asked_all_at = float("-inf")

    def begins(self, link: Link) -> bool:
        """Register a suspected link. True if no search for it is running, so that the caller must run `search`."""
        if link in self._searches:
            return False
        self._searches.add(link)
        return True

    async def search(self, link: Link, nursery: trio.Nursery) -> None:
        """Wait for an answer; if the peer stays silent, find another path to it. A dial runs in `nursery`."""
        try:
            if not await self._stays_silent(link):
                return
            self._links.distrust(link)
            self._ask_others(link)
            async with self._dials:
                if self._links.best(link.peer) is link and link.silence.doubted:
                    _log.debug("%s is silent; searching for another path", link)
                    with trio.move_on_after(_DIAL_S), suppress(Unreachable):
                        await self._dialer.reach(link.peer, nursery)
            best = self._links.best(link.peer)
            if best is not None and best is not link and link.silence.doubted:
                _log.info(
                    "%s has fallen silent at %s; new streams use its %s path",
                    link.peer.short,
                    link.remote,
                    best.way.word,
                )
        finally:
            self._searches.discard(link)

    async def _stays_silent(self, link: Link) -> bool:
        """Wait while the peer may still answer; True if it has been silent since it was pinged."""
        moment_s = max(_SILENT_S, _SILENT_RTTS * (link.rtt_s or 0.0))
        while link.usable and (asked_at := link.silence.doubted_at) is not None:
            if trio.current_time() >= asked_at + moment_s:
                return True
            await trio.sleep_until(asked_at + moment_s)  # in the meantime it may answer and be pinged again
        return False

    def _ask_others(self, silent: Link) -> None:
        now = trio.current_time()
        if now - self._asked_all_at >= _ALL_AGAIN_S:
            self._asked_all_at = now
            self._links.ask_others(silent)
