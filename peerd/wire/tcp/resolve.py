"""Connecting to a host name: both address families are looked up and tried concurrently (RFC 8305).

Has no sockets: the caller passes `connect`. The first connection wins; later ones are closed.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Final

import trio
from multiaddr import Multiaddr

from peerd.core.addr import TcpPlace, tcp_addr
from peerd.core.errors import Unreachable
from peerd.wire.happy_eyeballs import AddressHistory, NetworkSurroundings, order
from peerd.wire.race import RaceRun
from peerd.wire.transport import RawLink, close_surely

RESOLUTION_DELAY_S: Final = 0.05  # RFC 8305: how long IPv4 waits for the IPv6 lookup
_RESOLVED_MAX: Final = 4  # addresses of one name and family that are tried
_FAMILIES: Final = {
    "dns": (socket.AF_INET6, socket.AF_INET),
    "dns4": (socket.AF_INET,),
    "dns6": (socket.AF_INET6,),
}


class _Lookup:
    """The lookup of one name, and the attempts at its addresses."""

    def __init__(self, place: TcpPlace, connect: Callable[[Multiaddr], Awaitable[RawLink]]) -> None:
        self._place, self._connect = place, connect
        self._found: dict[Multiaddr, AddressHistory] = {}
        self._answered = {family: trio.Event() for family in _FAMILIES[place.family]}
        self._lookups = len(self._answered)  # still running
        self._failures: list[str] = []
        self._race = RaceRun(lambda: order(self._found, NetworkSurroundings(), trio.current_time()), self._try)
        self._race.awaits_more = True
        self._link: RawLink | None = None

    async def run(self) -> RawLink:
        given = False
        try:
            async with trio.open_nursery() as nursery:
                for family in self._answered:
                    nursery.start_soon(self._resolve, family)
                await self._race.run()
                nursery.cancel_scope.cancel()
            if self._link is not None:
                given = True
                return self._link
        finally:
            if self._link is not None and not given:
                await close_surely(self._link)
        if self._race.reasons:
            raise Unreachable("; ".join(self._race.reasons))
        reason = self._failures[0] if self._failures else "it has no address"
        raise Unreachable(f"the name {self._place.host} cannot be resolved: {reason}")

    async def _try(self, addr: Multiaddr) -> None:
        link = await self._connect(addr)
        if self._link is None:
            self._link = link
            self._race.stop()
        else:
            await close_surely(link)

    async def _resolve(self, family: socket.AddressFamily) -> None:
        found: list[str] = []
        try:
            entries = await trio.socket.getaddrinfo(self._place.host, self._place.port, family, socket.SOCK_STREAM)
            found = [str(entry[4][0]) for entry in entries[:_RESOLVED_MAX]]
        except (OSError, UnicodeError) as error:
            self._failures.append(_reason(error))
        self._answered[family].set()
        if family == socket.AF_INET and socket.AF_INET6 in self._answered:
            with trio.move_on_after(RESOLUTION_DELAY_S):
                await self._answered[socket.AF_INET6].wait()
        self._found.update((tcp_addr(host, self._place.port), AddressHistory()) for host in found)
        self._lookups -= 1
        self._race.awaits_more = self._lookups > 0
        self._race.learned()


async def connect_by_name(place: TcpPlace, connect: Callable[[Multiaddr], Awaitable[RawLink]]) -> RawLink:
    """Connect to a `place` with a host name. Raises Unreachable with the reason of each address."""
    return await _Lookup(place, connect).run()


def _reason(error: OSError | UnicodeError) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return text[:1].lower() + text[1:]
