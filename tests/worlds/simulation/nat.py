"""Machines behind NATs in the simulated network, and TCP's simultaneous open through them.

    internet = Internet(net)
    server = internet.home("server", "public")                   # Transports, for hosts
    lonely = internet.home("lonely", "symmetric", resets=True)   # its router answers unexpected packets with RST

Each connection request (SYN) is a packet: it creates a mapping in the sender's router, and is passed, dropped or
refused by the other router. Behind that router it finds a request in the other direction (both then become one
connection), a listener, or nothing. Dials use the listening port unless that pair of endpoints is in use. Data is then
sent as in `memory`. Not modelled: the expiry of mappings (`forget` removes all mappings of a home), and that a RST
blocks a mapping briefly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, get_args

import trio
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr, tcp_place
from peerd.core.errors import ConfigError, Unreachable
from tests.worlds.simulation.memory import MemoryLink, MemoryListener
from tests.worlds.simulation.sim_pipe import SimPipe
from tests.worlds.simulation.simnet import SimLine, SimNet, SimNode

Kind = Literal["public", "firewall", "full-cone", "port-restricted", "symmetric"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
_EPHEMERAL: Final = 32768
_MAPPED: Final = 20000


class SimPlace(NamedTuple):
    """An endpoint of a connection, as in a packet's header."""

    host: str
    port: int

    @property
    def addr(self) -> Multiaddr:
        return tcp_addr(self.host, self.port)


@dataclass(eq=False)
class _Request:
    """A pending connection request."""

    port: int
    target: SimPlace
    done: trio.Event = field(default_factory=trio.Event)
    link: MemoryLink | None = None
    over: bool = False  # answered or cancelled

    def answer(self, link: MemoryLink | None) -> None:
        if not self.over:
            self.over, self.link = True, link
            self.done.set()


class SimRouter:
    """A home's router: its port mappings, and the filter of incoming packets."""

    def __init__(self, kind: Kind, outside: str, inside: str) -> None:
        self.kind = kind
        self.outside, self.inside = outside, inside
        self._mapped: dict[tuple[int, SimPlace | None], int] = {}  # (port at home, destination) -> port outside
        self._contacts: dict[int, set[SimPlace]] = {}  # port outside -> destinations of earlier packets
        self._next_port = _MAPPED
        self._forwarded: dict[int, int] = {}  # port outside -> port at home

    def forward(self, port: int, outside: int = 0) -> None:
        """Forward the router's port `outside` (0: the same number) to `port` at home, like a rule set by its owner."""
        self._forwarded[outside or port] = port

    def out(self, port: int, target: SimPlace) -> SimPlace:
        """Translate the source of an outgoing packet; returns the public endpoint."""
        seen = port
        if self.kind in ("full-cone", "port-restricted", "symmetric"):
            key = port, target if self.kind == "symmetric" else None
            if key not in self._mapped:
                self._next_port += 7
                self._mapped[key] = self._next_port
            seen = self._mapped[key]
        self._contacts.setdefault(seen, set()).add(target)
        return SimPlace(self.outside, seen)

    def into(self, port: int, source: SimPlace) -> int | None:
        """The port at home to which a packet to the router's `port` is passed, or None if it is blocked."""
        if port in self._forwarded:
            return self._forwarded[port]
        if self.kind == "public":
            return port
        contacts = self._contacts.get(port, set())
        if not contacts or (self.kind != "full-cone" and source not in contacts):
            return None
        if self.kind == "firewall":
            return port
        return next(home for (home, _), seen in self._mapped.items() if seen == port)

    def forget(self) -> None:
        """Remove all mappings, as if the router was restarted; new mappings get other ports."""
        self._mapped.clear()
        self._contacts.clear()


class Internet:
    """Creates the homes (machines behind routers) of a simulated network."""

    def __init__(self, net: SimNet) -> None:
        self.net = net
        self.homes: dict[str, NatHome] = {}  # by public address

    def home(self, name: str, kind: Kind, *, resets: bool = False, line: SimLine | None = None) -> NatHome:
        """Add a machine behind a new router of this kind. `resets`: the router answers blocked packets with RST."""
        number = len(self.homes) + 1
        ip = f"45.{number >> 8}.{number & 255}.1"
        node = self.net.add_node(name, line, ip=ip)
        hidden = kind not in ("public", "firewall")
        router = SimRouter(kind, ip, f"192.168.{number & 255}.2" if hidden else ip)
        home = self.homes[ip] = NatHome(self, node, router, resets)
        return home


class NatHome:
    """The Transport of one machine behind its router."""

    def __init__(self, internet: Internet, node: SimNode, router: SimRouter, resets: bool) -> None:
        self.router = router
        self._net, self._homes, self._node, self._resets = internet.net, internet.homes, node, resets
        self._listeners: dict[int, MemoryListener] = {}
        self._requests: dict[tuple[int, SimPlace], _Request] = {}
        self._taken: dict[tuple[int, SimPlace], MemoryLink] = {}
        self._next_port = _EPHEMERAL

    def can_dial(self, addr: Multiaddr) -> bool:
        place = tcp_place(addr)
        return place is not None and place.family == "ip4" and place.port != 0

    async def listen(self, addr: Multiaddr) -> MemoryListener:
        await trio.lowlevel.checkpoint()
        place = tcp_place(addr)
        if place is None or place.port == 0 or place.port in self._listeners:
            raise ConfigError(f"cannot listen on {addr} here")
        listener = MemoryListener(self._net, self._node, tcp_addr(self.router.inside, place.port))
        self._listeners[place.port] = listener
        return listener

    async def dial(self, addr: Multiaddr, *, fresh: bool = False) -> MemoryLink:
        place = tcp_place(addr)
        if place is None:
            raise Unreachable(f"{addr} is not a TCP address")
        target = SimPlace(place.host, place.port)
        request = _Request(self._port(target, fresh), target)
        self._requests[request.port, target] = request
        began_s = trio.current_time()
        try:
            for number in range(len(self._net.config.syn_times_s)):
                self._ask(request)
                later = self._net.config.syn_times_s[number + 1 :] or (63.0,)
                with trio.move_on_at(began_s + later[0]):
                    await request.done.wait()
                    break
            if request.link is None:
                raise Unreachable("connection refused" if request.over else "timed out")
            return request.link
        finally:
            request.over = True
            del self._requests[request.port, target]

    def _port(self, target: SimPlace, fresh: bool) -> int:
        for port in self._listeners if not fresh else ():
            held = self._taken.get((port, target))
            if (port, target) not in self._requests and (held is None or held not in self._node.links):
                return port
        self._next_port += 1
        return self._next_port

    def _later(self, there: SimNode, what: Callable[[], None]) -> None:
        """Call `what` when a packet from here arrives `there`, unless the network drops it."""
        if self._net.passes(self._node, there):
            self._net.agenda.at(trio.current_time() + self._net.delay(self._node, there, 1), what)

    def _ask(self, request: _Request) -> None:
        """Send the SYN."""
        source = self.router.out(request.port, request.target)
        there = self._homes.get(request.target.host)
        if there is not None:
            self._later(there._node, lambda: there._asked(self, source, request))

    def _asked(self, asker: NatHome, source: SimPlace, request: _Request) -> None:
        """Handle a SYN from `asker`, whose public endpoint is `source`."""
        port = self.router.into(request.target.port, source)
        if port is None:
            if self._resets:
                self._later(asker._node, lambda: request.answer(None))
            return
        crossing, listener = self._requests.get((port, source)), self._listeners.get(port)
        if crossing is not None and not crossing.over:
            self._later(asker._node, lambda: asker._connect(request, (self, port), source, crossing))
        elif listener is not None:
            self._later(asker._node, lambda: asker._connect(request, (self, port), source, listener))
        else:
            self._later(asker._node, lambda: request.answer(None))

    def _connect(
        self, request: _Request, other: tuple[NatHome, int], source: SimPlace, end: _Request | MemoryListener
    ) -> None:
        """Handle the acceptance by `other`, a home and its port. `source`: our public endpoint."""
        if request.over:
            return  # our dial was cancelled; the other side's request continues
        net, (there, port) = self._net, other
        if isinstance(end, _Request) and end.over:
            request.answer(None)
            return
        to, back = SimPipe(net, self._node, there._node), SimPipe(net, there._node, self._node)
        near = MemoryLink(
            net, self._node, (to, back), (tcp_addr(self.router.inside, request.port), request.target.addr)
        )
        far = MemoryLink(net, there._node, (back, to), (tcp_addr(there.router.inside, port), source.addr))
        near.join(far)
        self._taken[request.port, request.target] = near
        there._taken[port, source] = far
        request.answer(near)
        if isinstance(end, _Request):
            end.answer(far)
        else:
            to.floor_s = trio.current_time() + net.delay(self._node, there._node, 1)
            net.agenda.at(to.floor_s, lambda: end.offer(far))
