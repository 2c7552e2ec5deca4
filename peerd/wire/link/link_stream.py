"""A Stream: ordered bytes to and from one peer under one protocol, with back-pressure in both directions.

A thin layer: `wire.yamux.session` handles windows and order, the Link the socket; this module adds the waiting.
Invariants: cancelling a receive loses nothing; cancelling a send withdraws all of its data, or resets the stream if a
part was already sent; no stream waits for a link that has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import trio
from multiaddr import Multiaddr

from peerd.core.errors import Cause, LocalError, ProtocolViolation, Refused, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.wire.budget.book import User
from peerd.wire.noise.multistream import MultistreamSelector, Proposal
from peerd.wire.path_selection import PathKind
from peerd.wire.yamux.session import YamuxSession
from peerd.wire.yamux.stream import YamuxStream

_COPY_BYTES = 64 * 1024  # about a frame: smaller sends are copied; larger ones wait until at most this much is left
_RECEIVE_BYTES = 256 * 1024  # maximum of one receive: larger blocks make the allocator call the system
_OFFER_BYTES = 16 * 1024  # passed at once to `receive_each`: a thousand of the smallest calls
_SEND_BUFFER_BYTES = 128 * 1024  # unsent bytes above which even small sends wait


def _unheard(_: int) -> None:
    """Ignore progress of `receive_into`."""


class StreamOwner(Protocol):
    """The part of a link that its streams and their users need."""

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
    """One stream of a link. At most one task sends and one receives at a time."""

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
        self, link: StreamOwner, mux: YamuxStream, protocol: str, negotiation: Proposal | MultistreamSelector
    ) -> None:
        self.protocol = protocol
        self.opened_at = trio.current_time()
        self._link, self._mux = link, mux
        self._negotiation: Proposal | MultistreamSelector | None = negotiation
        self._ended: str | None = None  # why the stream has ended
        self._refused = False  # the reason is the peer's refusal of the protocol
        self._readable: trio.Event | None = None
        self._writable: trio.Event | None = None
        self._over: trio.Event | None = None  # of tasks that wait for the end
        self._taker: Callable[[bytes], bool] | None = None  # callback of the task in `receive_each`
        self._landed: Callable[[int], None] | None = None  # callback of the task in `receive_into`
        self._sending = False

    @property
    def peer(self) -> PeerId:
        return self._link.peer

    @property
    def link(self) -> StreamOwner:
        return self._link

    @property
    def unsent_bytes(self) -> int:
        """Bytes passed to `send` and not sent yet."""
        return self._mux.out_bytes

    @property
    def superseded(self) -> bool:
        """True if a new stream would use a better link. Callers that keep a stream for later should open a new one."""
        return self._link.superseded_at is not None

    def __repr__(self) -> str:
        return f"<Stream {self.protocol or '?'} {self._mux.id} with {self.peer.short}>"

    # --- sending -------------------------------------------------------------------------------------------

    async def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`, waiting for the peer's window. Raises Unreachable once the stream has ended.

        Large data is not copied, so it must not change until this returns.
        """
        while self._sending:  # another task's data is sent first, as a whole
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
            # The rest is copied, so that the caller continues and its next bytes can fill the last frame.
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
        """Send small `data` without waiting. Returns False, and sends nothing, if `send` would wait or raise."""
        mux = self._mux
        if self._sending or self._ended is not None or mux.fin_due or mux.was_reset:
            return False
        if len(data) > _COPY_BYTES or mux.out_bytes > _SEND_BUFFER_BYTES:
            return False
        self._link.mux.write(mux, data)
        self._link.flush_now()
        return True

    async def close_write(self) -> None:
        """End the sending direction; data sent before still arrives."""
        if self._ended is None:
            self._link.mux.close_write(self._mux)
            self._link.flush()

    def _check_writable(self) -> None:
        if self._ended is not None:
            raise self._error(self._ended)
        if self._mux.was_reset:  # and `changed` is about to be called
            raise self._error("the peer reset the stream")
        if self._mux.fin_due:
            raise LocalError("send after close_write")

    async def _wait_writable(self) -> None:
        if self._writable is None:
            self._writable = trio.Event()
        await self._writable.wait()

    # --- receiving -----------------------------------------------------------------------------------------

    async def receive_some(self, max_bytes: int) -> bytes:
        """Receive at least one byte and at most `max_bytes`, or b"" at the end. Raises Unreachable after a reset."""
        if not await self._wait_readable():
            return b""
        data = self._mux.take(min(max_bytes, _RECEIVE_BYTES))
        self._link.consumed(self._mux)
        return data

    async def receive_view(self, max_bytes: int) -> memoryview:
        """Like `receive_some`, without a copy: the view and its slices are valid until the next receive."""
        if not await self._wait_readable():
            return memoryview(b"")
        view = self._mux.lend(max_bytes)
        self._link.consumed(self._mux)
        return view

    async def receive_each(self, take: Callable[[bytes], bool]) -> bool:
        """Call `take` with the bytes as they arrive, until it returns False; returns True then, False at the end.

        `take` often runs in the link's own task, which saves two turns of the event loop, so it must be quick and must
        not raise.
        """
        mux = self._mux
        mux.end_loan()  # bytes that are already here are passed before any wait
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
        """Receive exactly `count` bytes. Raises ProtocolViolation if the stream ends before."""
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
        """Fill all of `into`. Raises ProtocolViolation if the stream ends before.

        Data that arrives during the wait is decrypted directly into `into`. `landed` is called with the size of each
        piece, so that a caller that cancels knows the progress; it often runs in the link's own task.
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
        """Wait for input. True if there are bytes, a taker is done or `receive_into` is filled; False at the end."""
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
        """End both directions at once; the peer receives a reset. Never waits."""
        self._link.mux.reset(self._mux)
        self.end("this side reset the stream")
        self._link.release(self)

    async def aclose(self) -> None:
        """Stop reading, and end the sending direction after the data sent so far. May be repeated."""
        self._link.mux.abandon(self._mux)
        self.end("this side closed the stream")
        self._link.release(self)

    def doubt(self) -> None:
        """Report that an answer on this stream is overdue, so that the link checks whether the peer is alive."""
        self._link.doubt()

    async def wait_gone(self) -> None:
        """Wait until the stream is over: reset by either side, closed by this side, or its link lost."""
        while self._ended is None:
            if self._over is None:
                self._over = trio.Event()
            await self._over.wait()

    def _error(self, reason: str) -> RemoteError:
        if self._refused:
            return Refused(reason, self.peer, Cause.NO_SUCH_PROTOCOL)
        return Unreachable(reason, self.peer)

    # --- called by the link --------------------------------------------------------------------------------

    @property
    def mux(self) -> YamuxStream:
        return self._mux

    @property
    def negotiating(self) -> bool:
        return self._negotiation is not None

    def changed(self) -> None:
        """Called when bytes, an end or a reset have arrived."""
        mux = self._mux
        if self._negotiation is not None:
            if mux.was_reset and mux.inbound:
                self.reset()  # there is no handler that would do it
            else:
                self._negotiate(self._negotiation)
        if mux.was_reset and self._ended is None:
            if not mux.fin_received:  # data before a FIN is complete, and stays readable
                mux.inbox.clear()
                mux.inbox_bytes = 0
            self.end("the peer reset the stream")
        elif self._landed is not None and mux.landed_bytes:
            self._land(self._landed)
        elif self._readable is not None and not self._offer():
            self._readable.set()

    def _land(self, landed: Callable[[int], None]) -> None:
        """Report bytes that were decrypted into the reader's buffer, and wake the reader if it is full."""
        mux = self._mux
        size, mux.landed_bytes = mux.landed_bytes, 0
        self._link.mux.consumed(mux, trio.current_time())  # the link flushes after it has processed its data
        landed(size)
        if self._readable is not None and (mux.landing is None or mux.fin_received):
            self._readable.set()

    def _offer(self) -> bool:
        """Pass new bytes to the taker. Returns False if the reading task must wake."""
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
        """Mark the stream as ended: no more sending, and no receiving beyond the bytes that are already here."""
        if self._ended is None:
            self._ended = reason
        if self._over is not None:
            self._over.set()
        self.wake_writer()
        if self._readable is not None:
            self._readable.set()

    def _negotiate(self, negotiation: Proposal | MultistreamSelector) -> None:
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
            if isinstance(negotiation, MultistreamSelector):
                self._link.agreed(self)
        elif mux.fin_received and not mux.was_reset:
            self.end("the peer closed the stream before a protocol was agreed")
            if mux.inbound:
                self.reset()  # there is no handler that would do it
            else:
                self._link.mux.reset(mux)
        self._link.consumed(mux)
