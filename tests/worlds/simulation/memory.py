"""The in-memory transport: implements `peerd.wire.transport` on a SimNet, one transport per node.

Addresses are `/ip4/<ip of a node>/tcp/<port>` or /ip6, as with TCP, so that all address code works unchanged, or
`/memory/<n>`. A dial takes one round trip, as in TCP; if there is no answer, it fails after the retransmissions of the
SYN. Links deliver bytes in order, with the errors of the interface. Latency and rates are in `wire` and `simnet`.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import trio
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr, tcp_place
from peerd.core.errors import ConfigError, Unreachable
from tests.worlds.simulation.sim_pipe import SimPipe
from tests.worlds.simulation.simnet import SimNet, SimNode

_MEMORY: Final = b"\x89\x06"  # multiaddr code 0x0309 as a varint; its value has 8 bytes
_FIRST_PORT: Final = 4001  # given to listeners that ask for any
_LAST_PORT: Final = 65535


class MemoryLink:
    """One end of a connection: a RawLink."""

    def __init__(
        self,
        net: SimNet,
        node: SimNode,
        pipes: tuple[SimPipe[SimNode], SimPipe[SimNode]],
        ends: tuple[Multiaddr, Multiaddr],
    ) -> None:
        """`pipes`: outgoing and incoming; `ends`: addresses of this end and of the other."""
        self._net = net
        self._node = node
        self._out, self._in = out, into = pipes
        self.local, self._remote = ends
        self._other: MemoryLink | None = None
        self._closed = False
        self._broken = False
        self._sending = False
        self._receiving = False
        out.on_given_up = lambda: self.fail("timed out: nothing got through to the other side")
        into.on_refused = self._refuse
        node.links[self] = None

    @property
    def remote(self) -> Multiaddr:
        return self._remote

    def join(self, other: MemoryLink) -> None:
        """Connect the two ends of one connection."""
        self._other, other._other = other, self

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending on this link")
        self._sending = True
        try:
            await trio.lowlevel.checkpoint()
            view = memoryview(data).cast("B")
            at = 0
            self._check_writable()
            while at < len(view):
                room = self._out.room()
                if room == 0:
                    await self._out.wait_room()
                    self._check_writable()
                else:
                    part = bytes(view[at : at + room])
                    self._out.accept(part)
                    at += len(part)
        finally:
            self._sending = False

    def _check_writable(self) -> None:
        if self._closed:
            raise trio.ClosedResourceError("this link was closed")
        if self._out.writer_error is not None:
            raise trio.BrokenResourceError(self._out.writer_error)

    async def receive_some(self, max_bytes: int) -> bytes:
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving on this link")
        self._receiving = True
        try:
            if self._closed or self._in.readable():
                await trio.lowlevel.checkpoint()
            while not self._closed and not self._in.readable():
                await self._in.wait_readable()
            if self._closed:
                raise trio.ClosedResourceError("this link was closed")
            data = self._in.take(max_bytes)
            if not data and not self._in.ended and self._in.reader_error is not None:
                raise trio.BrokenResourceError(self._in.reader_error)
            return data
        finally:
            self._receiving = False

    async def aclose(self) -> None:
        if not self._closed:
            if not self._broken:
                self._out.accept(b"", last=True)
            self._close_here()
            self._in.fail_reader("closed")  # wakes the reader; both see that the link is closed
            self._out.fail_writer("closed")
            self._net.trace.add(self._node.name, "close", str(self._remote))
        await trio.lowlevel.checkpoint()

    def fail(self, why: str) -> None:
        """Break the connection at this end; bytes that have arrived stay readable."""
        if self._closed or self._broken:
            return
        self._broken = True
        self._out.fail_writer(why)
        self._in.fail_reader(why)
        self._node.links.pop(self, None)
        self._net.trace.add(self._node.name, "broken", f"{self._remote} {why}")

    def break_both(self, why: str) -> None:
        """Break the connection at both ends."""
        other = self._other
        self.fail(why)
        if other is not None:
            other.fail(why)

    def die(self) -> None:
        """End this side because its node is killed: it sends nothing more, and its system answers with resets.

        Tasks that wait here are not woken; they must be cancelled, since a dead process notices nothing.
        """
        self._out.writer_gone = True
        self._out.forget()
        self._close_here()
        self._refuse()

    def _close_here(self) -> None:
        self._closed = True
        self._in.reader_gone = True
        self._node.links.pop(self, None)

    def _refuse(self) -> None:
        """Send a reset to the other end; it arrives if the network passes packets at that time."""
        net, here, there = self._net, self._node, self._out.target

        def arrive() -> None:
            if self._other is not None and net.passes(here, there):
                self._other.fail("the other side reset the connection")

        if net.passes(here, there):
            net.agenda.at(trio.current_time() + net.delay(here, there, 1), arrive)


class MemoryListener:
    """Listener for links to one address."""

    def __init__(self, net: SimNet, node: SimNode, addr: Multiaddr) -> None:
        self._net = net
        self.node = node
        self._addr = addr
        self._waiting: deque[MemoryLink] = deque()
        self._acceptors = trio.lowlevel.ParkingLot()
        self._open = True

    @property
    def addrs(self) -> list[Multiaddr]:
        return [self._addr]

    async def accept(self) -> MemoryLink:
        if self._waiting or not self._open:
            await trio.lowlevel.checkpoint()
        while self._open and not self._waiting:
            await self._acceptors.park()
        if not self._open:
            raise trio.ClosedResourceError(f"the listener on {self._addr} was closed")
        return self._waiting.popleft()

    def offer(self, link: MemoryLink) -> None:
        """Queue an incoming link for `accept`; refuse it if the listener is closed or the backlog is full."""
        if not self._open or len(self._waiting) >= self._net.config.accept_backlog:
            link.die()
            return
        self._waiting.append(link)
        self._acceptors.unpark()

    def close(self) -> None:
        """Stop listening and refuse the links in the backlog. Does not wake a task that waits in `accept`."""
        self._open = False
        listeners = self._net.memory_listeners if _is_memory(self._addr) else self.node.listeners
        listeners.pop(str(self._addr), None)
        while self._waiting:
            self._waiting.popleft().die()

    async def aclose(self) -> None:
        if self._open:
            self.close()
            self._acceptors.unpark_all()
        await trio.lowlevel.checkpoint()


class MemoryTransport:
    """The in-memory Transport that the programs on one node use."""

    def __init__(self, net: SimNet, node: SimNode) -> None:
        self._net = net
        self._node = node

    def can_dial(self, addr: Multiaddr) -> bool:
        place = tcp_place(addr)
        return _is_memory(addr) or (place is not None and place.family in ("ip4", "ip6") and place.port != 0)

    async def dial(self, addr: Multiaddr, *, fresh: bool = False) -> MemoryLink:
        net, here = self._net, self._node
        started_s = trio.current_time()
        net.trace.add(here.name, "dial", str(addr))
        for wait_s in net.config.syn_times_s:
            await trio.sleep_until(started_s + wait_s)
            if not here.alive:
                raise Unreachable("this node was killed")
            there = self._node_of(addr)
            if net.passes(here, there) and net.passes(there, here):
                await trio.sleep(net.delay(here, there, 1) + net.delay(there, here, 1))
                if net.passes(here, there) and net.passes(there, here):
                    return self._connect(addr)
        raise Unreachable("timed out")

    def _node_of(self, addr: Multiaddr) -> SimNode:
        if _is_memory(addr):
            listener = self._net.memory_listeners.get(str(addr))
            node = None if listener is None else listener.node
        else:
            place = tcp_place(addr)
            node = None if place is None else self._net.node_at(place.host)
        if node is None:
            raise Unreachable("no route to host")
        return node

    def _connect(self, addr: Multiaddr) -> MemoryLink:
        net, here, there = self._net, self._node, self._node_of(addr)
        listener = (net.memory_listeners if _is_memory(addr) else there.listeners).get(str(addr))
        assert listener is None or isinstance(listener, MemoryListener)
        if not here.alive or listener is None:
            raise Unreachable("connection refused")
        if net.config.dial_failure > 0 and here.rng.random() < net.config.dial_failure:
            raise Unreachable("connection reset while dialling")
        to, back = SimPipe(net, here, there), SimPipe(net, there, here)
        source = tcp_addr(here.ip, _port(here, 32768))
        link = MemoryLink(net, here, (to, back), (source, addr))
        other = MemoryLink(net, there, (back, to), (addr, source))
        link.join(other)
        # The third packet of TCP's handshake creates the link at the other node, before any data arrives.
        to.floor_s = trio.current_time() + net.delay(here, there, 1)
        net.agenda.at(to.floor_s, lambda: listener.offer(other))
        net.trace.add(here.name, "connect", there.name)
        if net.config.link_life_s < float("inf"):
            ends_s = trio.current_time() + here.rng.expovariate(1 / net.config.link_life_s)
            net.agenda.at(ends_s, lambda: _break(link, other))
        return link

    async def listen(self, addr: Multiaddr) -> MemoryListener:
        await trio.lowlevel.checkpoint()
        net, node = self._net, self._node
        if not node.alive:
            raise ConfigError(f"can't listen on {addr}: this node was killed")
        exact = self._concrete(addr)
        listeners = net.memory_listeners if _is_memory(exact) else node.listeners
        if str(exact) in listeners:
            raise ConfigError(f"can't listen on {addr}: the port is in use")
        listener = MemoryListener(net, node, exact)
        listeners[str(exact)] = listener
        net.trace.add(node.name, "listen", str(exact))
        return listener

    def _concrete(self, addr: Multiaddr) -> Multiaddr:
        """Replace a wildcard address and port 0 by concrete ones. Raises ConfigError for another node's address."""
        if _is_memory(addr):
            if int.from_bytes(addr.to_bytes()[2:], "big") != 0:
                return addr
            self._net.next_memory += 1
            return Multiaddr(_MEMORY + (_FIRST_MEMORY + self._net.next_memory).to_bytes(8, "big"))
        place = tcp_place(addr)
        if place is None or place.host not in ("0.0.0.0", self._node.ip):
            raise ConfigError(f"can't listen on {addr}: this node has only {tcp_addr(self._node.ip, 0)} with any port")
        port = place.port
        while port == 0 or (place.port == 0 and str(tcp_addr(self._node.ip, port)) in self._node.listeners):
            port = _port(self._node, _FIRST_PORT)
        return tcp_addr(self._node.ip, port)


_FIRST_MEMORY: Final = 1 << 32  # larger numbers are assigned automatically, smaller ones are for the user


def _is_memory(addr: Multiaddr) -> bool:
    raw = addr.to_bytes()
    return len(raw) == 10 and raw.startswith(_MEMORY)


def _port(node: SimNode, first: int) -> int:
    """The node's next free port number, from `first` on."""
    port = node.next_port.get(first, first)
    node.next_port[first] = port + 1 if port < _LAST_PORT else first
    return port


def _break(link: MemoryLink, other: MemoryLink) -> None:
    link.fail("the connection was lost")
    other.fail("the connection was lost")
