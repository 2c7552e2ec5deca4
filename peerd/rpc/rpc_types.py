"""Interfaces that calls need (streams, the host, the access guard), and the values that handlers and callers get."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from peerd.codec.format.frame import TensorFrame
from peerd.core.ids import PeerId

if TYPE_CHECKING:
    from multiaddr import Multiaddr

    from peerd.core.errors import Refused
    from peerd.rpc.methods.method_load import MethodName
    from peerd.wire.budget.book import Book

B = TypeVar("B", bound=msgspec.Struct, covariant=True)


class Located(Protocol):
    """A link, of which calls need only the remote address."""

    @property
    def remote(self) -> Multiaddr: ...


class RpcStream(Protocol):
    """Ordered bytes to one peer, with back-pressure: the part of a `wire.link.link` stream that calls use."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def protocol(self) -> str: ...

    @property
    def link(self) -> Located | None:
        """The link that it runs on; None for a stream within this process."""
        ...

    @property
    def superseded(self) -> bool:
        """True if a new stream to this peer would take a better path."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Bytes passed to `send` that have not left yet."""
        ...

    def doubt(self) -> None:
        """Report an overdue answer, so that the link checks whether the peer is still there."""
        ...

    async def send(self, data: bytes | bytearray | memoryview) -> None: ...

    def send_nowait(self, data: bytes) -> bool:
        """Send small `data` whole and without waiting. Returns False, and sends nothing, if `send` would wait or
        raise.
        """
        ...

    async def receive_some(self, max_bytes: int) -> bytes: ...

    async def receive_view(self, max_bytes: int) -> memoryview:
        """As `receive_some`; the view is valid until the next receive."""
        ...

    async def receive_into(self, into: memoryview, landed: Callable[[int], None]) -> None:
        """Fill all of `into`. Raises ProtocolViolation if the stream ends before.

        `landed` gets the size of each piece, perhaps in another task; it must be quick and must not raise.
        """
        ...

    async def receive_each(self, take: Callable[[bytes], bool]) -> bool:
        """Pass arriving bytes to `take` as they come. Returns True once `take` returned False, or False at the peer's
        end.

        `take` may run in another task, as soon as bytes arrive; it must be quick and must not raise.
        """
        ...

    async def wait_gone(self) -> None:
        """Return once the stream is over: reset by either side, closed by this one, or its link lost."""
        ...

    def reset(self) -> None: ...

    async def aclose(self) -> None: ...


class RpcHost(Protocol):
    """The part of `wire.host.host` that calls use."""

    @property
    def id(self) -> PeerId: ...

    @property
    def book(self) -> Book:
        """The use of this host's resources by each peer, address and address block."""
        ...

    async def open_stream(self, peer: PeerId, protocol: str) -> RpcStream: ...

    def when_moved(self, told: Callable[[PeerId], None]) -> None:
        """Call `told` when streams to a peer have become `superseded`."""
        ...

    def handle(self, protocol: str, handler: Callable[[RpcStream], Awaitable[None]]) -> None: ...

    async def supervise(self, work: Callable[[], Awaitable[None]], about: Callable[[], str]) -> bool:
        """Run `work`. An exception ends it and is logged with `about()`, but not raised. Returns True if `work`
        returned.
        """
        ...


class AccessGuard(Protocol):
    """Guard of incoming and outgoing calls: `access.access_guard` in a run with tokens. Without a guard all peers are
    admitted.
    """

    @property
    def token(self) -> bytes:
        """Our proof of membership; also part of the records that we publish."""
        ...

    def objection(self, caller: PeerId, method: MethodName) -> Refused | None:
        """The error for a call that is refused before any of it is received, or None."""
        ...

    def closed(self, caller: PeerId, methods: Iterable[MethodName]) -> bool:
        """True if the caller may use none of a service's `methods`. False if the service has none."""
        ...

    def knows(self, peer: PeerId, method: MethodName) -> bool:
        """True if `method` of `peer` can be called without `introduce`."""
        ...

    async def introduce(self, peer: PeerId, method: MethodName) -> None:
        """Send our token to `peer`, so that the method can be called. Raises RemoteError."""
        ...

    def forgotten(self, peer: PeerId, refusal: Refused) -> bool:
        """True if a call was refused only because `peer` has forgotten us; `introduce` then sends our token again."""
        ...

    def may_vote(self, peer: PeerId) -> bool:
        """True if the peer's clock counts among those by which ours is corrected."""
        ...

    def waits_for(self) -> str | None:
        """The problem with our own token and how to solve it, as text; None if it is valid."""
        ...

    def allows(self, peer: PeerId, role: str) -> bool:
        """True if a calling peer is a member with `role`."""
        ...

    def named(self, peer: PeerId, token: bytes, *roles: str) -> str | None:
        """The name, perhaps empty, that the organizer gave to the publisher of a record with `token` in it.

        Returns None, and logs the reason, if the publisher is not a member with one of `roles` (any role, if
        none is named).
        """
        ...


@dataclass(frozen=True, slots=True)
class Incoming(Generic[B]):
    """A call as passed to its handler. `deadline` is in trio time; the handler is cancelled then."""

    peer: PeerId
    body: B
    frames: tuple[TensorFrame, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Answer(Generic[B]):
    """An answer, or one part of a streaming call.

    Ready payload bytes of frames that we send must not change any more.
    """

    body: B
    frames: tuple[TensorFrame, ...] = ()
