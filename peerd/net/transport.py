"""The contract between the network and what carries its bytes: TCP, a memory pipe, a relayed circuit.

A transport moves bytes in order and nothing else: no encryption, no identity, no retry. `Host` puts Noise and
yamux on top. Every implementation passes the same compliance tests (tests/net/compliance.py).

Invariants: `send_all` returns when the bytes are taken, not when they are delivered; one task sends and one task
receives at a time, and both may wait at once; after `aclose` every waiting call ends. A broken or closed link raises
`trio.BrokenResourceError` or `trio.ClosedResourceError` and nothing else. Cancelling `receive_some` loses no byte;
cancelling `send_all` leaves the link unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, cast, runtime_checkable

import trio
from multiaddr import Multiaddr

from peerd.core.errors import ConfigError
from peerd.machine.connectivity.happy_eyeballs import IpNetwork
from peerd.net.tcp_info import TcpInfo


class NoSuchFamily(ConfigError):
    """Cannot listen there because this machine has no addresses of that kind at all."""


class RawLink(Protocol):
    """An unencrypted ordered byte pipe to one other side."""

    @property
    def remote(self) -> Multiaddr:
        """The other side's address as seen from here (no /p2p part)."""
        ...

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Hand over all of `data`; waits while the pipe is full."""
        ...

    async def receive_some(self, max_bytes: int) -> bytes:
        """At least one byte, at most `max_bytes`; b"" at the end of the other side's bytes."""
        ...

    async def aclose(self) -> None:
        """Close both directions at once; bytes already handed over are still delivered where possible."""
        ...


@runtime_checkable
class LocatedLink(RawLink, Protocol):
    """A RawLink that knows its own end's address: optional, to tell from which port it was dialed."""

    @property
    def local(self) -> Multiaddr: ...


@runtime_checkable
class LendingLink(RawLink, Protocol):
    """A RawLink that also shows what it received without allocating, sends without waiting, and knows how much is
    best sent at once: optional, for speed."""

    @property
    def batch_bytes(self) -> int:
        """About what one `send_all` should bring: more would only wait longer, where nothing can overtake it."""
        ...

    def begin_small(self) -> None:
        """Let little wait, until it is known how fast bytes leave: others are faster meanwhile."""
        ...

    def never_rest(self, always: bool) -> None:
        """Let nothing wait for a measurement of the path (BBR lets four packets a round trip go, for 0.2 s of each
        10): for a connection that carries small frames only. False: as the system does it."""
        ...

    def pace(self, bytes_per_s: float) -> None:
        """Let bytes leave evenly, at this rate at most, where the system can; inf: no more.

        A connection to a peer near by never rests from then on.
        """
        ...

    def send_nowait(self, data: memoryview) -> int:
        """Take what fits at once and say how much; 0 when nothing does, or when only `send_all` can say why not."""
        ...

    async def receive_view(self, useful_bytes: int = 1) -> memoryview:
        """As `receive_some`, but the bytes lie in a shared buffer and are valid only until the next await.

        Fewer than `useful_bytes` are of no use yet: it may wait for more, and need not.
        """
        ...


class CountedLink(RawLink, Protocol):
    """A RawLink whose packets the system counts: optional, for measuring the line."""

    def tcp_info(self) -> TcpInfo | None:
        """The system's counters of this connection; None where it keeps none."""
        ...


@runtime_checkable
class RankedLink(RawLink, Protocol):
    """A RawLink that shares a limited line with others: optional."""

    def rank_by(self, is_first: Callable[[], bool]) -> None:
        """Set the rule by which its bytes come before those of others; asked at each turn, since membership changes."""
        ...


def counted(raws: Iterable[RawLink]) -> dict[CountedLink, TcpInfo]:
    """The system's counters of each of these connections; nothing where it keeps none."""
    # `isinstance` would take longer than the system's answer.
    links = (cast(CountedLink, raw) for raw in raws if hasattr(raw, "tcp_info"))
    return {raw: info for raw in links if (info := raw.tcp_info()) is not None}


class Listener(Protocol):
    """A place where links arrive."""

    @property
    def addrs(self) -> list[Multiaddr]:
        """The addresses it really listens on at the moment: port filled in, wildcard addresses replaced by concrete
        ones.
        """
        ...

    async def accept(self) -> RawLink:
        """The next link; raises trio.ClosedResourceError once the listener is closed."""
        ...

    async def aclose(self) -> None:
        """Stop listening; links already accepted live on."""
        ...


class Transport(Protocol):
    """A way to reach addresses of one kind."""

    def can_dial(self, addr: Multiaddr) -> bool:
        """True when `addr` (without /p2p) is of this transport's kind."""
        ...

    async def dial(self, addr: Multiaddr, *, fresh: bool = False) -> RawLink:
        """Connect; raises Unreachable with the reason. Only an address that leads over a relay comes with its /p2p.

        From the port on which this side listens, where the network knows ports and that one is free towards `addr`, so
        that routers in between map one port only. `fresh`: from a port that was never used, for a test of whether
        strangers get through to `addr`.
        """
        ...

    async def listen(self, addr: Multiaddr) -> Listener:
        """Start listening; raises ConfigError naming `addr` when that is impossible (port in use, not ours).

        NoSuchFamily when `addr` is the wildcard of a kind of which this machine has no addresses.
        """
        ...


class RoamingTransport(Transport, Protocol):
    """A Transport that knows where this machine is in the network, which may change: optional."""

    def networks(self) -> tuple[IpNetwork, ...]:
        """Networks that this machine is in at the moment."""
        ...

    async def relocated(self) -> None:
        """Wait until the machine's addresses are others than at the call; what listeners name is others then, too."""
        ...


def roaming(transports: Iterable[Transport]) -> list[RoamingTransport]:
    """Those that know where this machine is."""
    # `isinstance` would take longer than all else that is asked of them, for each message of the directory.
    return [cast(RoamingTransport, each) for each in transports if hasattr(each, "networks")]


async def close_surely(*ends: RawLink | Listener) -> None:
    """Close these, even while being cancelled."""
    with trio.CancelScope(shield=True):
        for end in ends:
            await end.aclose()
