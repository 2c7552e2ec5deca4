"""CallStream: one side of a streaming call, parts in both directions with half-close and back-pressure.

Little is read ahead: if a side does not receive, the other side's sending blocks. The reader of the stream delivers
parts here; this module neither reads streams nor starts tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import LocalError, Overloaded, RemoteError, Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_BUDGET_WAIT_S, RPC_PARTS_AHEAD
from peerd.messages.encoding import decode, encode
from peerd.rpc.inbound import Inbound, Place
from peerd.rpc.methods.message_codec import END, PART, RpcMessage, encode_message
from peerd.rpc.outbox import GrowingPayload, Outbox, Outgoing, outgoing
from peerd.rpc.room import Share
from peerd.rpc.rpc_types import Answer

B = TypeVar("B", bound=msgspec.Struct)


class Encoded:
    """One part for many calls, encoded once. Its frames are complete and never change."""

    __slots__ = ("body", "count", "headers", "payloads")

    def __init__(self, body: msgspec.Struct, frames: Sequence[TensorFrame] = ()) -> None:
        self.body, self.count = encode(body), len(frames)
        self.headers, self.payloads = outgoing(frames) if frames else (b"", [])
        if any(isinstance(payload, GrowingPayload) for payload in self.payloads):
            raise LocalError("a part for many calls is not complete yet")


class CallStream:
    """One side of a streaming call: `send` parts, `finish` sending, `receive` parts until None."""

    def __init__(self, peer: PeerId, call_id: int, outbox: Outbox, share: Share) -> None:
        self.peer = peer
        self.sending = True  # until we have sent END
        self.receiving = True  # until the other side has sent END or the call is over
        self._patient = False  # whether frames of parts may arrive at any rate
        self._arriving: Inbound | None = None  # set while a part's frames are received
        self.place: Place | None = None  # returns the buffers for a part's frames; must not raise
        self._id = call_id
        self._outbox = outbox
        self._share = share
        self._parts: deque[tuple[RpcMessage, tuple[TensorFrame, ...]]] = deque()
        self._failure: RemoteError | None = None
        self._changed = trio.lowlevel.ParkingLot()

    async def send(self, body: msgspec.Struct, frames: Sequence[TensorFrame] = ()) -> None:
        """Send one part; waits while the other side is slow to receive. With frames: returns when they may be changed
        again.

        Raises Overloaded if the peer has too much unread, on all its streams. Also raises errors of a payload's
        producer. Such an error, or cancelling while a payload is being produced, ends the call.
        """
        if not self.sending:
            raise LocalError("a part after finish")
        self._check()
        headers, payloads = outgoing(frames) if frames else (b"", [])
        self._put(encode_message(PART, self._id, encode(body), headers, len(frames)), *payloads)
        await self._outbox.feed(payloads)
        waited = await (self._outbox.flushed() if frames else self._outbox.room())
        self._check()
        if not waited:
            await trio.lowlevel.checkpoint()

    def put(self, part: Encoded) -> None:
        """Queue one part without waiting. Dropped if the call is over; the call fails if too much is unread.

        Check `full` first, and use `on_room` to put more later.
        """
        if not self.sending:
            raise LocalError("a part after finish")
        message = encode_message(PART, self._id, part.body, part.headers, part.count)
        if (full := self._outbox.put(message, *part.payloads)) is not None:
            self.fail(_unread(full, self.peer))

    @property
    def full(self) -> bool:
        """True if enough parts wait to be sent: do not put more until `on_room` calls back."""
        return self._outbox.full

    def be_patient(self) -> None:
        """Accept any rate for the frames of parts, because the other side has proved that it takes part in a round."""
        self._patient = True
        if self._arriving is not None:
            self._arriving.be_patient()

    @property
    def left_bytes(self) -> int:
        """Bytes transmitted on this call's stream. Growth shows that the other side accepts them."""
        return self._outbox.left_bytes

    def on_room(self, then: Callable[[], None] | None) -> None:
        """Call `then` whenever the call is no longer full; None removes the callback. It must be quick and must not
        raise.
        """
        if then is None:
            self._outbox.on_room.pop(self._id, None)
        else:
            self._outbox.on_room[self._id] = then

    def finish(self) -> None:
        """Send no more parts. The other side's `receive` then returns None after the last one."""
        if self.sending:
            self.sending = False
            self._put(encode_message(END, self._id))

    async def receive(self, kind: type[B]) -> Answer[B] | None:
        """The next part; None if the other side sends no more. For a caller this means that the handler has ended.

        Raises the error that ended the call, after the parts that preceded it.
        """
        waited = False
        while not self._parts:
            if self._failure is not None:
                raise self._failure
            if not self.receiving:
                await trio.lowlevel.checkpoint()
                return None
            await self._changed.park()
            waited = True
        message, frames = self._parts.popleft()
        self._share.give(message.frame_bytes)
        self._changed.unpark_all()
        if not waited:
            await trio.lowlevel.checkpoint()
        try:
            return Answer(decode(kind, message.body), frames)
        except RemoteError as error:
            raise error.blame(self.peer) from None

    def _put(self, *message: Outgoing) -> None:
        if (full := self._outbox.put(*message)) is not None:
            raise _unread(full, self.peer)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._outbox.closed:
            raise Unreachable("the stream was closed", self.peer)

    # Called by the reader of the stream.

    async def take(self, part: RpcMessage, inbound: Inbound, deadline: float) -> None:
        """Receive a part's frames and queue it; waits while enough parts are queued. Raises Overloaded or TooSlow."""
        frames: tuple[TensorFrame, ...] = ()
        if part.headers:
            self._arriving = inbound
            try:
                frames = await inbound.frames(part, deadline, self.place, self._patient)
            finally:
                self._arriving = None
        wanted = False
        try:
            while len(self._parts) >= RPC_PARTS_AHEAD and self.receiving:
                await self._changed.park()
            wanted = self.receiving
        finally:
            if not wanted:
                self._share.give(part.frame_bytes)
        if wanted:
            self._parts.append((part, frames))
            self._changed.unpark_all()

    def no_more_parts(self) -> None:
        """Record that the other side has sent END."""
        self.receiving = False
        self._changed.unpark_all()

    def fail(self, error: RemoteError) -> None:
        """Fail the call: parts already delivered can still be received, then `error` is raised."""
        if self._failure is None:
            self._failure = error
        self.no_more_parts()

    def discard(self) -> None:
        """Discard all parts, because no task will receive them."""
        self.no_more_parts()
        while self._parts:
            self._share.give(self._parts.popleft()[0].frame_bytes)


def _unread(full: str, peer: PeerId) -> Overloaded:
    return Overloaded(f"the peer has too much unread: {full}", RPC_BUDGET_WAIT_S, peer)
