"""Interfaces of transports, which carry bytes between hosts: TCP, a memory pipe, a relayed circuit.

A transport delivers bytes in order, without encryption, identity or retries. `Host` adds Noise and yamux. Every
implementation passes the same compliance tests (tests/wire/compliance.py).

Invariants: `send_all` returns when the bytes are buffered, not when they are delivered; one task sends and one task
receives at a time, and both may wait at once; after `aclose` every waiting call ends. A broken or closed link raises
only `trio.BrokenResourceError` or `trio.ClosedResourceError`. Cancelling `receive_some` loses no bytes; cancelling
`send_all` leaves the link unusable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, cast, runtime_checkable

import trio
from multiaddr import Multiaddr

from peerd.core.errors import ConfigError
from peerd.wire.happy_eyeballs import IpNetwork
from peerd.wire.tcp_info import TcpInfo


class NoSuchFamily(ConfigError):
    """Cannot listen: this machine has no addresses of that family."""


class RawLink(Protocol):
    """An unencrypted, ordered byte stream to the other end of a connection."""

    @property
    def remote(self) -> Multiaddr:
        """The other end's address as seen from here, without /p2p."""
        ...

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`; waits while the buffer is full."""
        ...

    async def receive_some(self, max_bytes: int) -> bytes:
        """Receive at least one byte and at most `max_bytes`. Returns b"" at the end of the stream."""
        ...

    async def aclose(self) -> None:
        """Close both directions at once; buffered bytes are still delivered if possible."""
        ...


@runtime_checkable
class LocatedLink(RawLink, Protocol):
    """A RawLink with a `local` address, from which the port of a dial is known. Optional."""

    @property
    def local(self) -> Multiaddr: ...


@runtime_checkable
class LendingLink(RawLink, Protocol):
    """A RawLink that also receives into a shared buffer, sends without waiting, and has a preferred batch size.
    Optional, for speed.
    """

    @property
    def batch_bytes(self) -> int:
        """Preferred size of one `send_all`. More would wait in the system's buffer, where nothing can overtake it."""
        ...

    def begin_small(self) -> None:
        """Keep the send buffer small until the sending rate is known. For one of several parallel connections."""
        ...

    def never_rest(self, always: bool) -> None:
        """For a connection with small frames only: avoid congestion control that pauses to measure the path (BBR sends
        only four packets per round trip for 0.2 s in every 10 s). False: restore the system's default.
        """
        ...

    def pace(self, bytes_per_s: float) -> None:
        """Send evenly, at this rate at most, if the system supports it; inf: no limit.

        After this, a connection to a nearby peer also behaves as after `never_rest(True)`.
        """
        ...

    def send_nowait(self, data: memoryview) -> int:
        """Send the part of `data` that fits without waiting; returns its size in bytes. Returns 0 if nothing fits or
        the link is broken, which `send_all` then reports.
        """
        ...

    async def receive_view(self, useful_bytes: int = 1) -> memoryview:
        """Like `receive_some`, but the bytes are in a shared buffer and valid only until the next await.

        The caller cannot use fewer than `useful_bytes` yet, so the link may wait for that many.
        """
        ...


class CountedLink(RawLink, Protocol):
    """A RawLink with the system's packet counters. Optional, for bandwidth measurements."""

    def tcp_info(self) -> TcpInfo | None:
        """The system's counters of this connection, or None if there are none."""
        ...


@runtime_checkable
class RankedLink(RawLink, Protocol):
    """A RawLink that shares a rate limit with others. Optional."""

    def rank_by(self, is_first: Callable[[], bool]) -> None:
        """Set the function that returns True while this link has priority; called often, since membership changes."""
        ...


def counted(raws: Iterable[RawLink]) -> dict[CountedLink, TcpInfo]:
    """The system's counters of each of these connections that has some."""
    # `isinstance` would take longer than the system call.
    links = (cast(CountedLink, raw) for raw in raws if hasattr(raw, "tcp_info"))
    return {raw: info for raw in links if (info := raw.tcp_info()) is not None}


class Listener(Protocol):
    """An open listening address, which accepts links."""

    @property
    def addrs(self) -> list[Multiaddr]:
        """The concrete addresses that it listens on now, with the real port and the machine's IPs for wildcards."""
        ...

    async def accept(self) -> RawLink:
        """Wait for the next link. Raises trio.ClosedResourceError once the listener is closed."""
        ...

    async def aclose(self) -> None:
        """Stop listening; accepted links stay open."""
        ...


class Transport(Protocol):
    """Dials and listens on addresses of one kind."""

    def can_dial(self, addr: Multiaddr) -> bool:
        """True if `addr` (without /p2p) is of this transport's kind."""
        ...

    async def dial(self, addr: Multiaddr, *, fresh: bool = False) -> RawLink:
        """Connect; raises Unreachable with the reason. `addr` includes the destination's /p2p only if it is relayed.

        Dials from the listening port if possible, so that NATs need only one mapping. `fresh`: dial from an unused
        port, to test whether strangers can reach `addr`.
        """
        ...

    async def listen(self, addr: Multiaddr) -> Listener:
        """Start listening. Raises ConfigError with `addr` if that is impossible (port in use, not a local address).

        Raises NoSuchFamily if `addr` is a wildcard and this machine has no addresses of its family.
        """
        ...


class RoamingTransport(Transport, Protocol):
    """A Transport that knows this machine's networks, which may change. Optional."""

    def networks(self) -> tuple[IpNetwork, ...]:
        """The networks that this machine is in now."""
        ...

    async def relocated(self) -> None:
        """Wait until this machine's addresses, and so those of the listeners, have changed since the call."""
        ...


def roaming(transports: Iterable[Transport]) -> list[RoamingTransport]:
    """The transports that know this machine's networks."""
    # `isinstance` would take longer than the calls that follow, which are made for each directory message.
    return [cast(RoamingTransport, each) for each in transports if hasattr(each, "networks")]


async def close_surely(*ends: RawLink | Listener) -> None:
    """Close these even if the task is cancelled."""
    with trio.CancelScope(shield=True):
        for end in ends:
            await end.aclose()
