"""A Stream: ordered bytes to one peer under one protocol name, with back-pressure both ways.

Thin: the window and the order are `machine.mux.session`'s, the socket is the Link's. This file turns "not yet" into
waiting. Invariants: cancelling a receive loses nothing; cancelling a send takes it back whole, or resets the stream
when a part was already on its way; a stream is never left waiting on a link that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio
from multiaddr import Multiaddr

from peerd.core.errors import LocalError, ProtocolViolation, Refused, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.machine.budget.book import User
from peerd.machine.connectivity.path_selection import PathKind
from peerd.machine.mux.session import YamuxSession
from peerd.machine.mux.stream import YamuxStream
from peerd.machine.secure.multistream import Proposal, ProtocolSelector

_COPY_BYTES = 64 * 1024  # about a frame: smaller sends are copied; larger ones wait until no more than this is left
_RECEIVE_BYTES = 256 * 1024  # one receive returns no more: larger blocks make the allocator go back to the system
_OFFER_BYTES = 16 * 1024  # given at once to a reader of each piece: a thousand of the smallest calls
_SEND_BUFFER_BYTES = 128 * 1024  # unsent bytes above which even small sends wait


def _unheard(_: int) -> None:
    """Ignore the pieces that land: no reader asked to hear of them."""


class StreamOwner(Protocol):
    """The link of a stream: what the stream needs of it, and what the stream's users may know."""

    way: PathKind
    peer: PeerId
    initiator: bool
    remote: Multiaddr
    local: Multiaddr | None
    observed: Multiaddr | None
    user: User
    mux: YamuxSession
    superseded_at: float | None

    def flush(self) -> None: ...

    def flush_now(self) -> None: ...

    def consumed(self, mux: YamuxStream) -> None: ...

    def agreed(self, stream: Stream) -> None: ...

    def doubt(self) -> float: ...

    def release(self, stream: Stream) -> None: ...

    def abort(self, reason: str) -> None: ...


class Stream:
    """One stream of a link. Each direction is used by one task at a time."""

    __slots__ = (
        "_ended",
        "_landed",
        "_link",
        "_mux",
        "_negotiation",
        "_over",
        "_readable",
        "_refused",
        "_sending",
        "_taker",
        "_writable",
        "opened_at",
        "protocol",
    )

    def __init__(
        self, link: StreamOwner, mux: YamuxStream, protocol: str, negotiation: Proposal | ProtocolSelector
    ) -> None:
        self.protocol = protocol
        self.opened_at = trio.current_time()
        self._link, self._mux = link, mux
        self._negotiation: Proposal | ProtocolSelector | None = negotiation
        self._ended: str | None = None  # why nothing more can be done
        self._refused = False  # that reason is the peer's refusal of the protocol
        self._readable: trio.Event | None = None
        self._writable: trio.Event | None = None
        self._over: trio.Event | None = None  # someone waits for the end
        self._taker: Callable[[bytes], bool] | None = None  # the task that waits in `receive_each`
        self._landed: Callable[[int], None] | None = None  # the task that waits in `receive_into`
        self._sending = False

    @property
    def peer(self) -> PeerId:
        return self._link.peer

    @property
    def link(self) -> StreamOwner:
        return self._link

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were handed over, and have not left yet."""
        return self._mux.out_bytes

    @property
    def superseded(self) -> bool:
        """True when a new stream would take a better link: whoever keeps this one for later had better open another."""
        return self._link.superseded_at is not None

    def __repr__(self) -> str:
        return f"<Stream {self.protocol or '?'} {self._mux.id} with {self.peer.short}>"

    # --- sending -------------------------------------------------------------------------------------------

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Hand over all of `data`, waiting for the peer's window; raises Unreachable once the stream has ended.

        Large data is sent from where it lies: it must not change until this returns.
        """
        while self._sending:  # another task's bytes go first, whole
            await self._wait_writable()
        self._check_writable()
        view = memoryview(data).cast("B")
        if not view:
            return
        mux, session = self._mux, self._link.mux
        large = len(view) > _COPY_BYTES
        piece = view if large else bytes(data)
        session.write(mux, piece)
        self._link.flush()
        if not large and mux.out_bytes <= _SEND_BUFFER_BYTES:
            return
        self._sending = True
        try:
            mux.low_water = _COPY_BYTES
            while self._ended is None and mux.low_water >= 0:
                await self._wait_writable()
            # The rest is copied, so that the caller goes on and its next bytes fill up the last frame of these.
            mux.own()
        except trio.Cancelled:
            if not mux.retract(piece):
                self.reset()
            raise
        finally:
            mux.low_water = -1
            self._sending = False
            self.wake_writer()
        if self._ended is not None:
            raise self._error(self._ended)

    def send_nowait(self, data: bytes) -> bool:
        """Take small `data` at once and whole; False, and nothing taken, where `send` would wait or raise."""
        mux = self._mux
        if self._sending or self._ended is not None or mux.fin_due or mux.was_reset:
            return False
        if len(data) > _COPY_BYTES or mux.out_bytes > _SEND_BUFFER_BYTES:
            return False
        self._link.mux.write(mux, data)
        self._link.flush_now()
        return True

    async def close_write(self) -> None:
        """Say that nothing more comes; what was sent before still arrives."""
        if self._ended is None:
            self._link.mux.close_write(self._mux)
            self._link.flush()

    def _check_writable(self) -> None:
        if self._ended is not None:
            raise self._error(self._ended)
        if self._mux.was_reset:  # and the link is about to say so
            raise self._error("the peer reset the stream")
        if self._mux.fin_due:
            raise LocalError("send after close_write")

    async def _wait_writable(self) -> None:
        if self._writable is None:
            self._writable = trio.Event()
        await self._writable.wait()

    # --- receiving -----------------------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int) -> bytes:
        """At least one byte and at most `max_bytes`, or b"" after the peer's end; raises Unreachable on a reset."""
        if not await self._wait_readable():
            return b""
        data = self._mux.take(min(max_bytes, _RECEIVE_BYTES))
        self._link.consumed(self._mux)
        return data

    async def receive_view(self, max_bytes: int) -> memoryview:
        """As `receive_some`, without a copy: the view, and whatever is cut from it, holds until the next receive."""
        if not await self._wait_readable():
            return memoryview(b"")
        view = self._mux.lend(max_bytes)
        self._link.consumed(self._mux)
        return view

    async def receive_each(self, take: Callable[[bytes], bool]) -> bool:
        """Give `take` the bytes as they come, until it returns False (then True) or the peer's end (then False).

        `take` often runs in the link's own task, which saves two turns of the loop: it is quick and raises nothing.
        """
        mux = self._mux
        mux.end_loan()  # the bytes at hand are given before anything is waited for
        try:
            while True:
                while mux.inbox and self._negotiation is None:
                    if not take(self._pull()):
                        return True
                self._taker = take
                if not await self._wait_readable():
                    return False
                if self._taker is None:
                    return True
        finally:
            self._taker = None

    def _pull(self) -> bytes:
        data = self._mux.take(_OFFER_BYTES)
        self._link.consumed(self._mux)
        return data

    async def receive_exactly(self, count: int) -> bytes:
        """Exactly `count` bytes; ProtocolViolation when the stream ends before."""
        parts = []
        left = count
        while left:
            part = await self.receive_some(left)
            if not part:
                raise ProtocolViolation(f"{self.protocol} ends {left} bytes early", self.peer)
            left -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def receive_into(self, into: bytearray | memoryview, landed: Callable[[int], None] = _unheard) -> None:
        """Fill all of `into`; ProtocolViolation when the stream ends before.

        What comes while this waits is decrypted where it belongs, and this wakes when all is there. `landed` is told of
        each piece, so that a caller that cancels knows how far it came; it often runs in the link's own task.
        """
        view, mux = memoryview(into).cast("B"), self._mux
        while view:
            if not mux.inbox and self._negotiation is None:
                mux.landing, self._landed = view, landed
            try:
                more = await self._wait_readable()
                view = view if self._landed is None else mux.landing or view[:0]
            finally:
                mux.landing = self._landed = None
            if view and not more:
                raise ProtocolViolation(f"{self.protocol} ends {len(view)} bytes early", self.peer)
            if view:
                size = mux.take_into(view)
                self._link.consumed(mux)
                landed(size)
                view = view[size:]

    async def _wait_readable(self) -> bool:
        """True when there are bytes, or a taker has had enough, or all has landed; False at the end."""
        mux, taken, landing = self._mux, self._taker is not None, self._landed is not None
        mux.end_loan()
        while not mux.inbox or self._negotiation is not None:
            if landing and mux.landing is None:
                return True
            if mux.fin_received and self._negotiation is None:
                return False
            if self._ended is not None:
                raise self._error(self._ended)
            if self._readable is not None:
                raise LocalError("two tasks read one stream")
            self._readable = trio.Event()
            try:
                await self._readable.wait()
            finally:
                self._readable = None
            if taken and self._taker is None:
                return True
        return True

    # --- the end -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """End both directions now; the peer sees a reset. Never waits."""
        self._link.mux.reset(self._mux)
        self.end("this side reset the stream")
        self._link.release(self)

    async def aclose(self) -> None:
        """No more reading, and the end for the peer once it has read what was sent. Harmless when repeated."""
        self._link.mux.abandon(self._mux)
        self.end("this side closed the stream")
        self._link.release(self)

    def doubt(self) -> None:
        """An answer on this stream is overdue: see whether the peer is still there."""
        self._link.doubt()

    async def wait_gone(self) -> None:
        """Returns once the stream is over: reset by either side, closed by this one, or its link lost."""
        while self._ended is None:
            if self._over is None:
                self._over = trio.Event()
            await self._over.wait()

    def _error(self, reason: str) -> RemoteError:
        return Refused(reason, self.peer) if self._refused else Unreachable(reason, self.peer)

    # --- called by the link --------------------------------------------------------------------------------

    @property
    def mux(self) -> YamuxStream:
        return self._mux

    @property
    def negotiating(self) -> bool:
        return self._negotiation is not None

    def changed(self) -> None:
        """Bytes, an end or a reset have come."""
        mux = self._mux
        if self._negotiation is not None:
            if mux.was_reset and mux.inbound:
                self.reset()  # no handler will ever do it, and none is to begin
            else:
                self._negotiate(self._negotiation)
        if mux.was_reset and self._ended is None:
            if not mux.fin_received:  # what came before a FIN stays readable: the peer finished saying it
                mux.inbox.clear()
                mux.inbox_bytes = 0
            self.end("the peer reset the stream")
        elif self._landed is not None and mux.landed_bytes:
            self._land(self._landed)
        elif self._readable is not None and not self._offer():
            self._readable.set()

    def _land(self, landed: Callable[[int], None]) -> None:
        """Tell the reader that waits for these bytes, and wake it when they are the last."""
        mux = self._mux
        size, mux.landed_bytes = mux.landed_bytes, 0
        self._link.mux.consumed(mux, trio.current_time())  # the link flushes when all it has read is handed over
        landed(size)
        if self._readable is not None and (mux.landing is None or mux.fin_received):
            self._readable.set()

    def _offer(self) -> bool:
        """Give what has come to the taker; False when whoever reads must wake."""
        mux = self._mux
        while self._taker is not None and mux.inbox and self._negotiation is None:
            if not self._taker(self._pull()):
                self._taker = None
        return self._taker is not None and not mux.fin_received

    def wake_writer(self) -> None:
        if self._writable is not None:
            self._writable.set()
            self._writable = None

    def end(self, reason: str) -> None:
        """Nothing more can be sent, and nothing received beyond what is already here."""
        if self._ended is None:
            self._ended = reason
        if self._over is not None:
            self._over.set()
        self.wake_writer()
        if self._readable is not None:
            self._readable.set()

    def _negotiate(self, negotiation: Proposal | ProtocolSelector) -> None:
        mux = self._mux
        data = mux.take(mux.inbox_bytes)
        if isinstance(negotiation, Proposal):
            try:
                rest = negotiation.feed(data)
            except Refused as refusal:
                self._refused = True
                self.end(str(refusal))
                self._link.mux.reset(mux)
                return
        else:
            answer, chosen, rest = negotiation.feed(data)
            if answer:
                self._link.mux.write(mux, answer)
            rest = rest if chosen is not None else None
            self.protocol = chosen or ""
        if rest is not None:
            self._negotiation = None
            mux.give_back(rest)
            if isinstance(negotiation, ProtocolSelector):
                self._link.agreed(self)
        elif mux.fin_received and not mux.was_reset:
            self.end("the peer closed the stream before a protocol was agreed")
            if mux.inbound:
                self.reset()  # nobody else will
            else:
                self._link.mux.reset(mux)
        self._link.consumed(mux)
