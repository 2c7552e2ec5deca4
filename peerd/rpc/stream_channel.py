"""Making streaming calls: each uses a stream alone while it lasts, so that its parts never wait for other calls.

Reads the handler's messages and passes them to the caller's CallStream. If a call ends regularly, its stream carries
the next one. If the caller leaves a call before its end, the stream is reset, which cancels the handler.
"""

from __future__ import annotations

import trio

from peerd.core.errors import ProtocolViolation, RemoteError, Unreachable
from peerd.rpc.call_stream import CallStream
from peerd.rpc.channel import Request, encode_request
from peerd.rpc.inbound import Inbound
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.methods.message_codec import RpcMessage, decode_failure
from peerd.rpc.outbox import Outbox
from peerd.rpc.room import Room, Share, asked, user_of
from peerd.rpc.rpc_types import RpcStream
from peerd.rpc.task_pool import Tasks
from peerd.wire.rate.arrival_rate import LineRates


class StreamChannel:
    """The caller's end of a stream for streaming calls, one after another."""

    def __init__(self, stream: RpcStream, room: Room, rates: LineRates, tasks: Tasks) -> None:
        """Starts two of `tasks`, which write and read until the stream is over."""
        self.used = trio.current_time()
        self._stream = stream
        self._share = Share(room, asked(user_of(stream)), demanding=False)
        self._rates = rates
        self._outbox = Outbox()
        self._running = trio.CancelScope()
        self._over = False
        self._id = 0  # id of the newest call
        self._request: Request | None = None  # its request; None once the other side has sent END or an error
        self._parts: CallStream | None = None  # its parts; None once the caller has left it
        tasks.start(lambda: self._outbox.run(stream), self._about, stream.reset)
        tasks.start(self._read, self._about, lambda: self._fail(Unreachable("an error on this side", stream.peer)))

    def _about(self) -> str:
        return f"a streaming call to {self._stream.peer.short}"

    @property
    def over(self) -> bool:
        return self._over or self._outbox.closed

    @property
    def superseded(self) -> bool:
        return self._stream.superseded

    async def call(self, request: Request) -> CallStream:
        """Send a request. The previous call must have been left.

        Returns once the payloads of the request are produced; raises their producer's errors. In any case call `leave`
        next.
        """
        self._id += 1
        self._request = request
        self._parts = parts = CallStream(self._stream.peer, self._id, self._outbox, self._share)
        message = encode_request(wire.OPEN, self._id, request)
        self._outbox.put(*message)
        await self._outbox.feed(message)
        return parts

    def leave(self) -> None:
        """End the caller's side: a call that is not complete is cancelled on the other side."""
        self.used = trio.current_time()
        parts, self._parts = self._parts, None
        if self._request is not None or self._outbox.pending:
            self._end()
        if parts is not None:
            parts.finish()  # a handler that has sent all may still receive
            parts.discard()

    def close(self) -> None:
        """Close the stream; only while no call is running."""
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
        """Complete the call by a message that ends it. Returns False for a part, which does not end it."""
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
            raise ProtocolViolation("an answer that was not requested")
        return self._request, self._parts

    def _fail(self, error: RemoteError) -> None:
        """Fail the current call, if there is one, and end the stream."""
        if self._request is not None and self._parts is not None:
            self._parts.fail(error)
        self._end()
