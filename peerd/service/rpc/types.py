"""Contracts of calls: what they need from below, and what handlers and callers hold in their hands. Values and
contracts only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId

if TYPE_CHECKING:
    from multiaddr import Multiaddr

    from peerd.core.errors import Refused
    from peerd.machine.budget.book import Book
    from peerd.machine.rpc.method_load import MethodName

B = TypeVar("B", bound=msgspec.Struct, covariant=True)


class Located(Protocol):
    """A connection, as far as calls want to know of it."""

    @property
    def remote(self) -> Multiaddr: ...


class RpcStream(Protocol):
    """Ordered bytes to one peer, with back-pressure: what calls use of a `net.link.link` stream."""

    @property
    def peer(self) -> PeerId: ...

    @property
    def protocol(self) -> str: ...

    @property
    def link(self) -> Located | None:
        """The link that it runs on; None: it does not leave this machine's memory."""
        ...

    @property
    def superseded(self) -> bool:
        """True when a new stream to this peer would take a better way."""
        ...

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were handed over, and have not left yet."""
        ...

    def doubt(self) -> None:
        """An answer is overdue: see whether the peer is still there."""
        ...

    async def send(self, data: bytes | bytearray | memoryview) -> None: ...

    def send_nowait(self, data: bytes) -> bool:
        """Take small `data` at once and whole; False, and nothing taken, where `send` would wait or raise."""
        ...

    async def receive_some(self, max_bytes: int) -> bytes: ...

    async def receive_view(self, max_bytes: int) -> memoryview:
        """As `receive_some`; the view holds until the next receive."""
        ...

    async def receive_into(self, into: memoryview, landed: Callable[[int], None]) -> None:
        """Fill all of `into`; ProtocolViolation when the stream ends before.

        `landed` is told of each piece, perhaps in another task: it is quick and raises nothing.
        """
        ...

    async def receive_each(self, take: Callable[[bytes], bool]) -> bool:
        """Give `take` the bytes as they come, until it returns False (then True) or the peer's end (then False).

        `take` may run in another task, as soon as bytes come: it is quick and raises nothing.
        """
        ...

    async def wait_gone(self) -> None:
        """Returns once the stream is over: reset by either side, closed by this one, or its link lost."""
        ...

    def reset(self) -> None: ...

    async def aclose(self) -> None: ...


class RpcHost(Protocol):
    """The part of `net.host.host` that calls use."""

    @property
    def id(self) -> PeerId: ...

    @property
    def book(self) -> Book:
        """The use of this host's resources by each peer, place and region."""
        ...

    async def open_stream(self, peer: PeerId, protocol: str) -> RpcStream: ...

    def when_moved(self, told: Callable[[PeerId], None]) -> None:
        """Call `told` when streams to a peer have become `superseded`."""
        ...

    def handle(self, protocol: str, handler: Callable[[RpcStream], Awaitable[None]]) -> None: ...

    async def supervise(self, work: Callable[[], Awaitable[None]], about: Callable[[], str]) -> bool:
        """Run `work`; an exception ends it, is noted with `about()`, and goes no further. True: it returned."""
        ...


class AccessGuard(Protocol):
    """Guard of calls, in and out: `service.access` in a run with tokens. Without a gate, everyone."""

    @property
    def token(self) -> bytes:
        """Proof that we are a member, shown to others; it goes into the records that we publish."""
        ...

    def objection(self, caller: PeerId, method: MethodName) -> str | None:
        """Why a call is refused before anything of it is received; None when it is not."""
        ...

    def closed(self, caller: PeerId, methods: Iterable[MethodName]) -> bool:
        """True when none of a service's `methods` is for this caller; not where the service has none."""
        ...

    def knows(self, peer: PeerId, method: MethodName) -> bool:
        """True when `method` of `peer` can be called at once."""
        ...

    async def introduce(self, peer: PeerId, method: MethodName) -> None:
        """Make it so, or raise RemoteError."""
        ...

    def forgotten(self, peer: PeerId, refusal: Refused) -> bool:
        """True when a call was refused only because `peer` has forgotten us: another `introduce` shows our
        token anew.
        """
        ...

    def may_vote(self, peer: PeerId) -> bool:
        """True when the peer's clock counts among those by which ours is corrected."""
        ...

    def waits_for(self) -> str | None:
        """What is wrong with our own token, and what to do; None if it is valid."""
        ...

    def allows(self, peer: PeerId, role: str) -> bool:
        """True when a peer that calls us is a member with `role`."""
        ...

    def named(self, peer: PeerId, token: bytes, *roles: str) -> str | None:
        """The name, perhaps empty, that the organizer gave to the publisher of a record with `token` in it.

        None when that is no member with one of `roles`, which the log then says; without `roles`, no member.
        """
        ...


@dataclass(frozen=True, slots=True)
class Incoming(Generic[B]):
    """A call as its handler sees it. `deadline` is in trio time; the handler is cancelled then."""

    peer: PeerId
    body: B
    frames: tuple[TensorFrame, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class Answer(Generic[B]):
    """An answer, or one part of a streaming call.

    The payloads of frames that we send must not change any more, as far as they are ready.
    """

    body: B
    frames: tuple[TensorFrame, ...] = ()
