"""TCP: the transport of /ip4, /ip6, /dns, /dns4 and /dns6 addresses.

Converts operating system errors into messages, resolves wildcard addresses to concrete ones, and detects changes of
this machine's addresses. Dials use the listening port as their source port, so that a NAT keeps one mapping and others
see one address. No encryption, no retries, no choice among a peer's addresses.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import socket
import sys
from collections.abc import Callable, Sequence

import trio
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr, tcp_place
from peerd.core.errors import ConfigError, Unreachable
from peerd.wire.happy_eyeballs import IpNetwork
from peerd.wire.rate.send_buffer import SendBufferSizer
from peerd.wire.tcp.interfaces import NetworkPlace, here
from peerd.wire.tcp.resolve import connect_by_name
from peerd.wire.tcp_info import TcpInfo, tcp_info
from peerd.wire.transport import Listener, NoSuchFamily, RawLink

_FAMILIES = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
_OVERLOAD = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
# Errors after which a dial is repeated from another port: the same pair of addresses and ports is in use or was just
# closed, or the destination is not routed from the listening address.
_PORT_TAKEN = {errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EINVAL}
_OVERLOAD_PAUSE_S = 0.1  # before the next `accept` if the table of open files is full
_BACKLOG = 256
# On Windows, SO_REUSEADDR lets strangers take the port; other systems lack SO_REUSEPORT.
_CAN_SHARE_PORT = sys.platform != "win32" and hasattr(socket, "SO_REUSEPORT")
_READ_BYTES = 512 * 1024
_UNSENT_LIMIT = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # not every system has it
_CONGESTION = getattr(socket, "TCP_CONGESTION", None)  # Linux
_RESTING, _RESTLESS = b"bbr", b"reno"  # one pauses to measure the path, one is available everywhere
_SO_MAX_PACING_RATE = 47  # of Linux; not defined in Python
_SO_BUF_LOCK = 72  # of Linux since 5.14; not defined in Python
_PACED_BUFFER_BYTES = 128 * 1024  # the system counts twice this, including its overhead per packet
_UNPACED_BYTES_PER_S = (1 << 31) - 1  # means no pacing: faster than any single connection here
_TURN_BYTES = 256 * 1024  # sent without waiting, before other tasks get a turn
_WORTH_AWAITING_BYTES = 4 * 1024  # two packets or more: setting the option costs a system call
# Unread data in the receive queue keeps Linux from growing its window: when waiting for whole frames, a path of 100 ms
# stayed at 64 KiB per round trip.
_AWAITED_BYTES_MAX = 12 * 1024
# For nearby peers, no rate fills a window within a round trip; and if many connections share a line, each frame arrives
# in many pieces, each of which would cost a turn of the event loop.
_AWAITED_BYTES_MAX_NEAR = 64 * 1024
_NEAR_S = 0.005  # minimum round trip, without queues
_LOOK_S = 2.0  # interval of checks of the machine's addresses, each a fraction of a millisecond
_NO_FAMILY = {errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL}  # of a wildcard


class TcpLink:
    """One TCP connection, a LendingLink. Skips the wait for readiness if a system call will probably succeed."""

    __slots__ = (
        "_awaited_bytes",
        "_awaited_bytes_max",
        "_in_turn",
        "_lent",
        "_more",
        "_rule",
        "_sizer",
        "_socket",
        "local",
        "remote",
    )

    def __init__(self, sock: trio.socket.SocketType, remote: Multiaddr, lent: memoryview) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = socket.socket(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._socket.setblocking(False)
        host, port = self._socket.getsockname()[:2]
        self.local = tcp_addr(host, port)
        self._lent = lent
        self._sizer = SendBufferSizer()
        self._limit_unsent()
        self._awaited_bytes = 1  # the current SO_RCVLOWAT
        self._awaited_bytes_max = 0  # 0: not known yet
        self._in_turn = 0  # bytes sent since other tasks had a turn
        self._rule = b""  # the system's congestion control, if it was replaced
        self._more = False  # the last read was large, so there is probably more
        self.remote = remote

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`. Yields to other tasks only after _TURN_BYTES, or if the buffer is full."""
        waited = False
        with memoryview(data) as view:
            at, end = 0, len(view)
            sizer = self._sizer
            sizer.begin(trio.current_time())
            try:
                while at < end:
                    try:
                        size = self._socket.send(view[at:])
                        at += size
                        sizer.took(size)
                    except BlockingIOError:
                        if sizer.full(trio.current_time()):
                            self._limit_unsent()
                        await trio.lowlevel.wait_writable(self._socket)
                        waited = True
            except (OSError, ValueError) as error:
                raise self._lost(error) from error
        self._in_turn = 0 if waited else self._in_turn + end
        if self._in_turn > _TURN_BYTES:
            self._in_turn = 0
            await trio.lowlevel.checkpoint()
        if sizer.end(trio.current_time()):
            self._limit_unsent()

    @property
    def batch_bytes(self) -> int:
        return self._sizer.batch_bytes

    def tcp_info(self) -> TcpInfo | None:
        """The system's counters of this connection, or None if there are none."""
        return tcp_info(self._socket)

    def begin_small(self) -> None:
        self._sizer.begin_small()
        self._limit_unsent()

    def never_rest(self, always: bool) -> None:
        if _CONGESTION is None:
            return
        with contextlib.suppress(OSError):  # some systems do not allow the choice
            rule = self._socket.getsockopt(socket.IPPROTO_TCP, _CONGESTION, 16).rstrip(b"\0")
            if always and rule.startswith(_RESTING):
                self._socket.setsockopt(socket.IPPROTO_TCP, _CONGESTION, _RESTLESS)
                self._rule = rule
            elif not always and self._rule:
                self._socket.setsockopt(socket.IPPROTO_TCP, _CONGESTION, self._rule)
                self._rule = b""

    def pace(self, bytes_per_s: float) -> None:
        if sys.platform != "linux":
            return
        rate = int(min(bytes_per_s, _UNPACED_BYTES_PER_S))
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)
        if self._is_near():
            self._keep_rate(bytes_per_s)

    def _keep_rate(self, bytes_per_s: float) -> None:
        """Prepare the connection to a nearby peer for pacing at this rate; inf: no pacing.

        BBR allows only a few packets in flight on a path with a tiny bandwidth-delay product, and would lose bandwidth
        to other senders. The connection therefore switches to `_RESTLESS`, and does not switch back, because each
        switch resets the congestion window. The send buffer is made large enough for all bytes that may wait, so that
        one send call is enough.
        """
        paced = math.isfinite(bytes_per_s)
        if paced:
            self.never_rest(True)
        self._sizer.keep(bytes_per_s)
        self._limit_unsent()
        with contextlib.suppress(OSError):
            if not paced:
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, 0)  # the system sizes it again
            elif self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 2 * _PACED_BUFFER_BYTES:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PACED_BUFFER_BYTES)

    def _limit_unsent(self) -> None:
        """Limit the unsent bytes in the system's buffer to those that are sent within milliseconds: data that becomes
        urgent later cannot overtake them.
        """
        if _UNSENT_LIMIT is not None:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, _UNSENT_LIMIT, self._sizer.waiting_bytes)

    def send_nowait(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except (OSError, ValueError):
            return 0  # full or broken: `send_all` waits or raises

    async def receive_some(self, max_bytes: int) -> bytes:
        return bytes(await self._receive(self._lent[:max_bytes]))

    async def receive_view(self, useful_bytes: int = 1) -> memoryview:
        return await self._receive(self._lent, useful_bytes)

    async def _receive(self, into: memoryview, useful_bytes: int = 1) -> memoryview:
        try:
            if self._more:
                await trio.lowlevel.checkpoint()
            else:
                await self._wait_readable(useful_bytes)
            while True:
                try:
                    size = self._socket.recv_into(into)
                except BlockingIOError:
                    await self._wait_readable(useful_bytes)
                else:
                    self._more = size * 4 >= len(self._lent)
                    return into[:size]
        except (OSError, ValueError) as error:
            raise self._lost(error) from error

    async def _wait_readable(self, useful_bytes: int) -> None:
        """Wait until `useful_bytes` (up to a maximum) have arrived or the stream has ended. Saves useless wakeups."""
        count = min(useful_bytes, self._most_awaited()) if useful_bytes >= _WORTH_AWAITING_BYTES else 1
        if count != self._awaited_bytes:
            self._awaited_bytes = count
            with contextlib.suppress(OSError):  # not every system supports it
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
        await trio.lowlevel.wait_readable(self._socket)

    def _most_awaited(self) -> int:
        if not self._awaited_bytes_max:
            self._awaited_bytes_max = _AWAITED_BYTES_MAX_NEAR if self._is_near() else _AWAITED_BYTES_MAX
        return self._awaited_bytes_max

    def _is_near(self) -> bool:
        info = self.tcp_info()
        return info is not None and info.min_rtt_s < _NEAR_S

    async def aclose(self) -> None:
        if self._socket.fileno() != -1:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
        await trio.lowlevel.checkpoint()

    def _lost(self, error: OSError | ValueError) -> Exception:
        if self._socket.fileno() == -1:
            return trio.ClosedResourceError("the connection is closed")
        return trio.BrokenResourceError(_words(error))


LinkMaker = Callable[[trio.socket.SocketType, Multiaddr], TcpLink]


class TcpListener:
    """One listening socket."""

    __slots__ = ("_hosts", "_link", "_port", "_socket")

    def __init__(self, sock: trio.socket.SocketType, hosts: Callable[[], Sequence[str]], link: LinkMaker) -> None:
        """`hosts` returns the IP addresses on which the socket is reachable now."""
        self._socket, self._hosts, self._link = sock, hosts, link
        self._port: int = sock.getsockname()[1]

    @property
    def addrs(self) -> list[Multiaddr]:
        return [tcp_addr(host, self._port) for host in self._hosts()]

    async def accept(self) -> RawLink:
        while True:
            try:
                sock, place = await self._socket.accept()
                return self._link(sock, tcp_addr(place[0], place[1]))
            except OSError as error:
                if self._socket.fileno() == -1:
                    raise trio.ClosedResourceError("the listener is closed") from error
                # Any other error concerns the connection that was about to be accepted, not the listener.
                await trio.sleep(_OVERLOAD_PAUSE_S if error.errno in _OVERLOAD else 0)

    async def aclose(self) -> None:
        self._socket.close()
        await trio.lowlevel.checkpoint()


class TcpTransport:
    """The TCP transport. All its links share one receive buffer, which is never used across an await."""

    def __init__(self, link: Callable[[trio.socket.SocketType, Multiaddr, memoryview], TcpLink] = TcpLink) -> None:
        """`link` creates a link from a connected socket, the remote address and the shared receive buffer."""
        lent = memoryview(bytearray(_READ_BYTES))
        self._link: LinkMaker = lambda sock, remote: link(sock, remote, lent)
        self._listening: list[trio.socket.SocketType] = []
        self._place = NetworkPlace()

    def can_dial(self, addr: Multiaddr) -> bool:
        return tcp_place(addr) is not None

    async def dial(self, addr: Multiaddr, *, fresh: bool = False) -> RawLink:
        place = tcp_place(addr)
        if place is None:
            raise Unreachable(f"{addr} is not a TCP address")
        if place.family in _FAMILIES:
            return await self._connect(_FAMILIES[place.family], (place.host, place.port), fresh)
        return await connect_by_name(place, lambda each: self.dial(each, fresh=fresh))

    async def listen(self, addr: Multiaddr) -> Listener:
        place = tcp_place(addr)
        if place is None or place.family not in _FAMILIES:
            raise ConfigError(f"cannot listen on {addr}: give an IP address and a port, as in /ip4/0.0.0.0/tcp/31337")
        family = _FAMILIES[place.family]
        wildcard = ipaddress.ip_address(place.host).is_unspecified
        sock = None
        try:
            sock = trio.socket.socket(family, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            await sock.bind((place.host, place.port))
            _share_port(sock)  # only after `bind`, which must fail if another program listens there
            sock.listen(_BACKLOG)
        except OSError as error:
            if sock is not None:
                sock.close()
            kind = NoSuchFamily if wildcard and error.errno in _NO_FAMILY else ConfigError
            raise kind(f"cannot listen on {addr}: {_words(error)}") from error
        self._listening = [*(other for other in self._listening if other.fileno() != -1), sock]
        if not wildcard:
            return TcpListener(sock, lambda: [place.host], self._link)
        self._place = here()
        version = 4 if family == socket.AF_INET else 6
        return TcpListener(sock, lambda: self._place.hosts(version), self._link)

    def networks(self) -> tuple[IpNetwork, ...]:
        return self._place.networks()

    async def relocated(self) -> None:
        if self._place == NetworkPlace():
            self._place = here()
        before = self._place
        while self._place == before:
            await trio.sleep(_LOOK_S)
            self._place = here()

    async def _connect(self, family: int, target: tuple[str, int], fresh: bool) -> TcpLink:
        try:
            source = None if fresh else self._source(family, target[0])
            if source is not None:
                try:
                    return await self._connect_from(family, source, target)
                except OSError as error:
                    if error.errno not in _PORT_TAKEN:
                        raise
            return await self._connect_from(family, None, target)
        except OSError as error:
            raise Unreachable(_words(error)) from error

    async def _connect_from(self, family: int, source: tuple[str, int] | None, target: tuple[str, int]) -> TcpLink:
        sock = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            if source is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                _share_port(sock)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                await sock.bind(source)
            await sock.connect(target)
            host, port = sock.getpeername()[:2]
            return self._link(sock, tcp_addr(host, port))
        finally:
            sock.close()  # no-op on success, since the link has taken the descriptor

    def _source(self, family: int, host: str) -> tuple[str, int] | None:
        """The listening address and port to use as the source of a dial to `host`, or None to let the system choose."""
        if not _CAN_SHARE_PORT or _is_loopback(host):
            return None  # no NAT on the same machine, and its programs often share the address
        for sock in self._listening:
            if sock.fileno() != -1 and sock.family == family:
                own, port = sock.getsockname()[:2]
                if not _is_loopback(own) and _leads_from(own, host, family):
                    return own, port
        return None


def _leads_from(own: str, host: str, family: int) -> bool:
    """True if packets to `host` have the source address `own`. With an address of another interface, answers would not
    arrive.
    """
    if ipaddress.ip_address(own).is_unspecified:
        return True
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0]) == own
    except OSError:
        return False


def _share_port(sock: trio.socket.SocketType) -> None:
    """Let other sockets of the same user that set this option bind to the same port."""
    if _CAN_SHARE_PORT:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def _words(error: OSError | ValueError) -> str:
    # trio appends the address to strerror; name lookups have error numbers of their own.
    if isinstance(error, OSError) and error.errno and not isinstance(error, socket.gaierror):
        text = os.strerror(error.errno)
    else:
        text = getattr(error, "strerror", None) or str(error)
    return text[:1].lower() + text[1:]
