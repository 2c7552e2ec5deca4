"""Addresses of one host: where it listens, what else was announced, what is withheld, and the networks around.

Holds addresses and tells of changes; decides nothing about them (`machine.connectivity.reachability` does) and dials
nowhere. Invariants: each source replaces its own announcement only; withheld addresses are named to nobody, and whoever
waits for a change hears of each. Takes nothing from peers directly: what is announced was checked by its source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import trio
from multiaddr import Multiaddr

from peerd.core.addr import ip_of, is_relayed, reach, with_peer
from peerd.core.ids import PeerId
from peerd.machine.connectivity.happy_eyeballs import IpNetwork, NetworkSurroundings
from peerd.net.tcp.listen import open_listeners
from peerd.net.transport import Listener, RoamingTransport, Transport, close_surely, roaming

CONFIGURED = "configured"  # the source of addresses that the user announces: named first, and never withheld

_log = logging.getLogger("peerd.net")


class HostAddresses:
    """The addresses of one host, with its transports."""

    def __init__(self, own: PeerId, transports: Sequence[Transport], changed: Callable[[], None]) -> None:
        """`changed` is called when `addrs` may be others; it must not block."""
        self.candidates: list[Multiaddr] = []  # public addresses that are probably ours, for hole punching
        self._own, self._transports, self._changed = own, transports, changed
        self._listeners: list[Listener] = []
        self._announced: dict[str, list[Multiaddr]] = {}  # by source
        self._withheld: frozenset[Multiaddr] = frozenset()
        self._relocations, self._readdressed = trio.lowlevel.ParkingLot(), trio.lowlevel.ParkingLot()

    async def listen(self, addrs: Sequence[Multiaddr]) -> list[Listener]:
        """Open these places, all or none; ConfigError names the one that cannot be had."""
        self._listeners = await open_listeners(addrs, self._transports)
        return self._listeners

    async def close(self) -> None:
        """Listen no longer."""
        await close_surely(*self._listeners)
        self._listeners.clear()

    def addrs(self) -> list[Multiaddr]:
        """Addresses at which this host can be reached, with /p2p/<id>: where it listens and what was announced, less
        what is known to lead nowhere. Those that the user announces first, then public addresses, then those of this
        network, then ways over relays, then loopback.
        """
        configured = self.announced(CONFIGURED)
        found = [*configured, *self._announced_all(), *self.listen_addrs()]
        kept = [addr for addr in dict.fromkeys(found) if addr not in self._withheld or addr in configured]
        ranked = sorted(kept, key=lambda addr: -1 if addr in configured else _rank(addr))
        return [with_peer(addr, self._own) for addr in ranked]

    def listen_addrs(self) -> list[Multiaddr]:
        """Addresses on which this host listens, without /p2p; wildcard addresses are spelled out."""
        return list(dict.fromkeys(addr for listener in self._listeners for addr in listener.addrs))

    def networks(self) -> tuple[IpNetwork, ...]:
        """Networks that this machine is in; empty when they are not known."""
        return tuple(net for way in roaming(self._transports) for net in way.networks())

    def surroundings(self) -> NetworkSurroundings:
        """Network surroundings, on which the order of dials depends."""
        own = self.listen_addrs()
        seen = [addr for addr in (*own, *self._announced_all(), *self.candidates) if reach(addr) == 2]
        public = frozenset(ip for addr in seen if not is_relayed(addr) and (ip := ip_of(addr)) is not None)
        return NetworkSurroundings(self.networks(), frozenset(own), public)

    def announce(self, source: str, addrs: Sequence[Multiaddr]) -> None:
        """Further addresses of this host, such as those that relays or routers give it, instead of those that `source`
        announced before."""
        if self._announced.get(source, []) != list(addrs):
            self._announced[source] = list(addrs)
            self._tell()

    def announced(self, source: str) -> list[Multiaddr]:
        """Addresses that `source` announced last."""
        return list(self._announced.get(source, ()))

    def _announced_all(self) -> list[Multiaddr]:
        return [addr for addrs in self._announced.values() for addr in addrs]

    def withhold(self, addrs: Iterable[Multiaddr]) -> None:
        """Name these addresses to nobody: others have tried them in vain. Replaces what was withheld before."""
        withheld = frozenset(addrs)
        if self._withheld != withheld:
            self._withheld = withheld
            self._tell()

    # --- changes -----------------------------------------------------------------------------------------------

    async def readdressed(self) -> None:
        """Wait for the next change of `addrs`, for whoever tells them to others."""
        await self._readdressed.park()

    async def relocated(self) -> None:
        """Wait for this machine's next change of addresses: another network, an interface that comes or goes."""
        await self._relocations.park()

    async def follow(self, moved: Callable[[], None]) -> None:
        """Notice, until cancelled, when this machine is elsewhere; `moved` hears of it before anybody else."""
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
    """Sort key of our addresses: the order in which others should try them."""
    return (3, 1, 0)[reach(addr)] if not is_relayed(addr) else 2
