"""Addresses of one host: listen addresses, further announced ones, withheld ones, and this machine's networks.

Stores addresses and reports changes; `reach.reachability` decides about them. Does not dial. Invariants:
each source replaces only its own announcement; withheld addresses are sent to nobody; every waiting task is notified of
each change. No input from peers: each source has checked the addresses that it announces.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import trio
from multiaddr import Multiaddr

from peerd.core.addr import ip_of, is_relayed, reach, with_peer
from peerd.core.ids import PeerId
from peerd.wire.happy_eyeballs import IpNetwork, NetworkSurroundings
from peerd.wire.tcp.listen import open_listeners
from peerd.wire.transport import Listener, RoamingTransport, Transport, close_surely, roaming

CONFIGURED = "configured"  # source of the addresses that the user announces: listed first, and never withheld

_log = logging.getLogger("peerd.wire")


class HostAddresses:
    """The addresses of one host, with its transports."""

    def __init__(self, own: PeerId, transports: Sequence[Transport], changed: Callable[[], None]) -> None:
        """`changed` is called when the result of `addrs` may have changed; it must not block."""
        self.candidates: list[Multiaddr] = []  # public addresses that are probably ours, for hole punching
        self._own, self._transports, self._changed = own, transports, changed
        self._listeners: list[Listener] = []
        self._announced: dict[str, list[Multiaddr]] = {}  # by source
        self._withheld: frozenset[Multiaddr] = frozenset()
        self._relocations, self._readdressed = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()

    async def listen(self, addrs: Sequence[Multiaddr]) -> list[Listener]:
        """Listen on all these addresses, or raise ConfigError with the address that failed."""
        self._listeners = await open_listeners(addrs, self._transports)
        return self._listeners

    async def close(self) -> None:
        """Stop listening."""
        await close_surely(*self._listeners)
        self._listeners.clear()

    def addrs(self) -> list[Multiaddr]:
        """Addresses at which this host can be reached, with /p2p/<id>: listen addresses and announced ones, without
        withheld ones.

        Order: addresses that the user announces, public ones, those of this network, relayed ones, loopback.
        """
        configured = self.announced(CONFIGURED)
        found = [*configured, *self._announced_all(), *self.listen_addrs()]
        kept = [addr for addr in dict.fromkeys(found) if addr not in self._withheld or addr in configured]
        ranked = sorted(kept, key=lambda addr: -1 if addr in configured else _rank(addr))
        return [with_peer(addr, self._own) for addr in ranked]

    def listen_addrs(self) -> list[Multiaddr]:
        """Concrete addresses on which this host listens, without /p2p."""
        return list(dict.fromkeys(addr for listener in self._listeners for addr in listener.addrs))

    def networks(self) -> tuple[IpNetwork, ...]:
        """The networks that this machine is in; empty if unknown."""
        return tuple(net for way in roaming(self._transports) for net in way.networks())

    def surroundings(self) -> NetworkSurroundings:
        """This machine's networks and addresses, which determine the order of dials."""
        own = self.listen_addrs()
        seen = [addr for addr in (*own, *self._announced_all(), *self.candidates) if reach(addr) == 2]
        public = frozenset(ip for addr in seen if not is_relayed(addr) and (ip := ip_of(addr)) is not None)
        return NetworkSurroundings(self.networks(), frozenset(own), public)

    def announce(self, source: str, addrs: Sequence[Multiaddr]) -> None:
        """Set this host's further addresses from `source`, such as relays or the router. Replaces its earlier ones."""
        if self._announced.get(source, []) != list(addrs):
            self._announced[source] = list(addrs)
            self._tell()

    def announced(self, source: str) -> list[Multiaddr]:
        """The addresses of the last `announce` of `source`."""
        return list(self._announced.get(source, ()))

    def _announced_all(self) -> list[Multiaddr]:
        return [addr for addrs in self._announced.values() for addr in addrs]

    def withhold(self, addrs: Iterable[Multiaddr]) -> None:
        """Set the addresses that are not sent to anybody, because others cannot reach them; replaces earlier ones."""
        withheld = frozenset(addrs)
        if self._withheld != withheld:
            self._withheld = withheld
            self._tell()

    # --- changes -----------------------------------------------------------------------------------------------

    async def readdressed(self) -> None:
        """Wait for the next change of `addrs`."""
        await self._readdressed.park()

    async def relocated(self) -> None:
        """Wait for the next change of this machine's own addresses, such as another network or interface."""
        await self._relocations.park()

    async def follow(self, moved: Callable[[], None]) -> None:
        """Detect changes of this machine's addresses until cancelled; calls `moved` before it notifies others."""
        async with trio.open_nursery() as nursery:
            for transport in roaming(self._transports):
                nursery.start_soon(self._follow, transport, moved)

    async def _follow(self, transport: RoamingTransport, moved: Callable[[], None]) -> None:
        while True:
            await transport.relocated()
            _log.info("this machine's addresses changed: %s", ", ".join(map(str, self.listen_addrs())) or "none")
            moved()
            self._tell()
            self._relocations.unpark_all()

    def _tell(self) -> None:
        self._changed()
        self._readdressed.unpark_all()


def _rank(addr: Multiaddr) -> int:
    """Sort key of our addresses, in the order in which others should try them."""
    return (3, 1, 0)[reach(addr)] if not is_relayed(addr) else 2
