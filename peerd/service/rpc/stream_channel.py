"""Making streaming calls: each has a stream to itself while it lasts, so that its parts wait for nobody else's.

Reads what the handler sends and delivers it to the CallStream that the caller holds. A stream on which a call has come
to its end carries the next one; a call that the caller leaves before its end is reset, which cancels the handler.
"""

from __future__ import annotations

import trio

from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.machine.rate.arrival_rate import LineRates
from peerd.machine.rpc import message_codec as wire
from peerd.machine.rpc.message_codec import RpcMessage, decode_failure
from peerd.service.rpc.call_stream import CallStream
from peerd.service.rpc.channel import Request, encode_request
from peerd.service.rpc.inbound import Inbound
from peerd.service.rpc.outbox import Outbox
from peerd.service.rpc.room import Room, Share, asked, user_of
from peerd.service.rpc.task_pool import Tasks
from peerd.service.rpc.types import RpcStream


class StreamLane:
    """The caller's end of a stream for streaming calls, one after the other."""

    def __init__(self, stream: RpcStream, room: Room, rates: LineRates, tasks: Tasks) -> None:
        """Writes and reads in two of `tasks` until it is over."""
        self.used = trio.current_time()
        self._stream = stream
        self._share = Share(room, asked(user_of(stream)), demanding=False)
        self._rates = rates
        self._outbox = Outbox()
        self._running = trio.CancelScope()
        self._over = False
        self._id = 0  # of the newest call
        self._request: Request | None = None  # its; None once the other side has said all
        self._parts: CallStream | None = None  # its; None once the caller has left it
        tasks.start(lambda: self._outbox.run(stream), self._about, stream.reset)
        tasks.start(self._read, self._about, lambda: self._fail(Unreachable("a fault of this side", stream.peer)))

    def _about(self) -> str:
        return f"a streaming call to {self._stream.peer.short}"

    @property
    def over(self) -> bool:
        return self._over or self._outbox.closed

    @property
    def superseded(self) -> bool:
        return self._stream.superseded

    async def call(self, request: Request) -> CallStream:
        """Send a request; the call before was left.

        Returns once the payloads of the request are made; raises what their maker does. In any case `leave` comes next.
        """
        self._id += 1
        self._request = request
        self._parts = parts = CallStream(self._stream.peer, self._id, self._outbox, self._share)
        message = encode_request(wire.OPEN, self._id, request)
        self._outbox.put(*message)
        await self._outbox.feed(message)
        return parts

    def leave(self) -> None:
        """The caller wants nothing more: a call that is not complete is cancelled on the other side."""
        self.used = trio.current_time()
        parts, self._parts = self._parts, None
        if self._request is not None or self._outbox.pending:
            self._end()
        if parts is not None:
            parts.finish()  # a handler that has said all may still listen
            parts.discard()

    def close(self) -> None:
        """Close the stream, while no call is under way."""
        if not self.over:
            self._over = True
            self._running.cancel()
            self._outbox.end()

    def _end(self) -> None:
        self._over = True
        self._request = None
        self._running.cancel()
        self._outbox.close()  # wakes a sender, which then sees the failure
        self._stream.reset()

    async def _read(self) -> None:
        inbound = Inbound(self._stream, self._settle, self._rates, self._share)
        try:
            with self._running:
                while messages := await inbound.batch():
                    for message in messages:
                        if message.headers or not self._settle(message):
                            await self._take(message, inbound)
                raise Unreachable("the stream was closed before the call had ended")
        except RemoteError as error:
            self._fail(error.blame(self._stream.peer))
        finally:
            inbound.close()

    def _settle(self, message: RpcMessage) -> bool:
        """Settle the call by a message that ends it; False for a part, which does not."""
        _, parts = self._current(message)
        if message.kind == wire.ERROR:
            self._fail(decode_failure(message.body, self._stream.peer))
        elif message.kind == wire.END:
            self._request = None
            parts.no_more_parts()
        elif message.kind == wire.PART:
            return False
        else:
            raise ProtocolViolation(f"a message of kind {message.kind} for a streaming call")
        return True

    async def _take(self, message: RpcMessage, inbound: Inbound) -> None:
        request, parts = self._current(message)
        if message.kind != wire.PART:
            raise ProtocolViolation(f"a message of kind {message.kind} with frames for a streaming call")
        request.check(message)
        await parts.take(message, inbound, request.deadline)

    def _current(self, message: RpcMessage) -> tuple[Request, CallStream]:
        if self._request is None or self._parts is None or message.id != self._id:
            raise ProtocolViolation("an answer that nobody asked for")
        return self._request, self._parts

    def _fail(self, error: RemoteError) -> None:
        """The call has failed, and the stream with it; without a call, the stream alone."""
        if self._request is not None and self._parts is not None:
            self._parts.fail(error)
        self._end()
