"""Hosts in a simulated internet: public ones, and ones behind routers of the usual kinds.

A router here is a filter in front of a node that has the router's public address: what it does not let in is closed at
once, as by a reset. Mappings live for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import trio
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr, tcp_place
from peerd.net.transport import Listener, RawLink
from peerd.sim.memory import MemoryLink, MemoryListener, MemoryTransport
from peerd.sim.simnet import Line, SimNet

PORT = 4001
KINDS = ("public", "full-cone", "port-restricted", "symmetric", "firewall")
_HAS_ROUTER = ("full-cone", "port-restricted", "symmetric")


@dataclass
class Routed:
    """The Transport of a host that listens on PORT behind a router of `kind` with the public address `ip`."""

    net: SimNet
    name: str
    ip: str
    kind: str
    contacts: set[Multiaddr] = field(default_factory=set)  # whom our listening port has sent to
    forwards: bool = False  # the router passes PORT on to us

    def __post_init__(self) -> None:
        node = self.net.add_node(self.name, Line(latency_s=0.02), ip=self.ip)
        self._stable, self._changing = MemoryTransport(self.net, node, PORT), MemoryTransport(self.net, node)
        self.inside = tcp_addr("192.168.7.2" if self.kind in _HAS_ROUTER else self.ip, PORT)

    def lets_in(self, remote: Multiaddr) -> bool:
        if self.kind == "public" or self.forwards:
            return True
        return bool(self.contacts) if self.kind == "full-cone" else remote in self.contacts

    def can_dial(self, addr: Multiaddr) -> bool:
        return self._stable.can_dial(addr)

    async def dial(self, addr: Multiaddr, *, fresh: bool = False) -> RawLink:
        inner = self._changing if fresh or self.kind == "symmetric" else self._stable
        if not fresh:
            self.contacts.add(addr)
        link = await inner.dial(addr, fresh=fresh)
        link.local = self.inside if not fresh else tcp_addr("192.168.7.2", 33333)
        return link

    async def listen(self, addr: Multiaddr) -> Listener:
        place = tcp_place(addr)
        assert place is not None
        assert place.port == PORT
        return _RoutedListener(self, await self._stable.listen(tcp_addr(self.ip, PORT)))


class _RoutedListener:
    def __init__(self, router: Routed, inner: MemoryListener) -> None:
        self._router, self._inner = router, inner
        self.addrs = [router.inside]

    async def accept(self) -> MemoryLink:
        while True:
            link = await self._inner.accept()
            if self._router.lets_in(link.remote):
                return link
            with trio.CancelScope(shield=True):
                await link.aclose()

    async def aclose(self) -> None:
        await self._inner.aclose()
