"""Failover: another path to a peer that has fallen silent on the one in use, before that is given up.

A doubted link keeps some seconds, since bulk makes a ping wait; of a line that went dead, callers would wait for all of
them, and for a dial after that. So a doubted peer that stays silent is dialed anew, over a relay where nothing else
leads to it. Once another link stands new streams take that one, and what waits on the silent one waits not much longer:
who is heard on one path, and says nothing on another where it was asked, is not there. What cut one peer off may have
cut off more, so that the others are asked as well, and those that are silent, too, are not found one after the other. A
link that is heard again is as good as before. Invariants: one search for each link at a time, and few dials; without
another path nothing changes.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Final

import trio

from peerd.core.errors import Unreachable
from peerd.net.host.dialer import Dialer
from peerd.net.host.link_table import Links
from peerd.net.link.link import Link

_log = logging.getLogger("peerd.net")
_SILENT_S: Final = 1.0  # that a peer has to answer before another path is looked for; more where round trips are long
_SILENT_RTTS: Final = 4
_ALL_AGAIN_S: Final = 1.0  # between two times that all others are asked
_DIAL_S: Final = 4.0  # then the silent link has ended, or it is tried afresh: an old dial keeps others from a new one
_DIALS: Final = 16  # at once: our own line may have gone dead


class Failover:
    """See the module's header."""

    def __init__(self, links: Links, dialer: Dialer) -> None:
        self._links, self._dialer = links, dialer
        self._searches: set[Link] = set()
        self._dials = trio.Semaphore(_DIALS)
        self._asked_all_at = float("-inf")

    def begins(self, link: Link) -> bool:
        """True when `search` is to be called for this link: the first time that it is doubted."""
        if link in self._searches:
            return False
        self._searches.add(link)
        return True

    async def search(self, link: Link, nursery: trio.Nursery) -> None:
        """Give the peer a moment; if it stays silent, have another path to it. A dial runs in `nursery`."""
        try:
            if not await self._stays_silent(link):
                return
            self._links.distrust(link)
            self._ask_others(link)
            async with self._dials:
                if self._links.best(link.peer) is link and link.silence.doubted:
                    _log.debug("%s is silent: another path is looked for", link)
                    with trio.move_on_after(_DIAL_S), suppress(Unreachable):
                        await self._dialer.reach(link.peer, nursery)
            best = self._links.best(link.peer)
            if best is not None and best is not link and link.silence.doubted:
                _log.info(
                    "%s has fallen silent at %s: its %s path is used", link.peer.short, link.remote, best.way.word
                )
        finally:
            self._searches.discard(link)

    async def _stays_silent(self, link: Link) -> bool:
        """Wait until the peer had its moment to answer; True: it says nothing, and has not since it was asked."""
        moment_s = max(_SILENT_S, _SILENT_RTTS * (link.rtt_s or 0.0))
        while link.usable and (asked_at := link.silence.doubted_at) is not None:
            if trio.current_time() >= asked_at + moment_s:
                return True
            await trio.sleep_until(asked_at + moment_s)  # it may be heard meanwhile, and asked again
        return False

    def _ask_others(self, silent: Link) -> None:
        now = trio.current_time()
        if now - self._asked_all_at >= _ALL_AGAIN_S:
            self._asked_all_at = now
            self._links.ask_others(silent)
