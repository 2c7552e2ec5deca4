"""Making unary calls: a Channel is a stream to one service of one peer, used until it is lost or idle for long.

All small calls to a service share one channel: requests made in one turn of the event loop are sent in one write, and
answers may arrive in any order. Each call with frames takes a channel of its own (see Rpc). Answers with frames delay
others on a shared channel, so the channel records the methods that returned some, and their next calls take a channel
of their own, too. When there is a better path to the peer, new calls take another channel, and calls in progress end on
the old one. A cancelled or overdue call is cancelled on the other side as well.

A hostile peer may send unrequested or too large answers, or never answer. The first two cost it the channel; the third
costs each caller its own timeout, with at most RPC_PENDING waiting calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import outcome
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import Overloaded, ProtocolViolation, RemoteError, TooSlow, Unreachable
from peerd.core.ids import PeerId
from peerd.rpc.inbound import Inbound, Slot, renewed
from peerd.rpc.methods import message_codec as wire
from peerd.rpc.methods.message_codec import RpcMessage, decode_failure, encode_call, encode_message
from peerd.rpc.methods.method_load import PendingCalls
from peerd.rpc.outbox import Outbox, Outgoing, outgoing
from peerd.rpc.room import Room, Share, asked, user_of
from peerd.rpc.rpc_types import RpcStream
from peerd.rpc.task_pool import Tasks
from peerd.wire.rate.arrival_rate import LineRates

Reply = tuple[bytes, tuple[TensorFrame, ...]]  # the body, still encoded, and the frames
OpenStream = Callable[[], Awaitable[RpcStream]]


@dataclass(frozen=True, slots=True)
class Request:
    """An encoded request; `deadline` is in trio time."""

    name: bytes
    body: bytes
    frames: Sequence[TensorFrame]
    timeout_s: float
    deadline: float
    reply_frame_bytes: int  # limit for the answer's frames

    def too_slow(self, peer: PeerId) -> TooSlow:
        return TooSlow(f"no answer to {self.name.decode()} within {self.timeout_s:g} s", peer)

    def check(self, message: RpcMessage) -> None:
        """Raise ProtocolViolation if an answer's frames are larger than the caller accepts."""
        if message.frame_bytes > self.reply_frame_bytes:
            size = f"{message.frame_bytes} bytes; allowed: {self.reply_frame_bytes}"
            raise ProtocolViolation(f"an answer to {self.name.decode()} with frames of {size}")


def encode_request(kind: int, call_id: int, request: Request) -> list[Outgoing]:
    """The request and the payloads of its frames, which are not copied."""
    headers, payloads = outgoing(request.frames)
    start = encode_call(kind, call_id, request.name, request.timeout_s, request.body, headers, len(payloads))
    return [start, *payloads]


class _Waiting(Slot[Reply]):
    """A call that waits for its answer."""

    __slots__ = ("feeding", "request")

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request
        self.feeding: trio.CancelScope | None = None  # set while its payloads are still being produced

    def _settle(self, result: outcome.Value[Reply] | outcome.Error) -> None:
        super()._settle(result)
        if self.feeding is not None:
            self.feeding.cancel()  # the answer came before all was sent


class Channel:
    """One stream to a service of a peer, and the unary calls on it."""

    def __init__(self, peer: PeerId, room: Room, rates: LineRates) -> None:
        self.calls: PendingCalls[_Waiting] = PendingCalls()
        self.answers_with_frames: set[bytes] = set()  # names of methods
        self.used = trio.current_time()
        self.over = False  # no further calls are possible
        self._peer = peer
        self._room = room
        self._rates = rates
        self._outbox = Outbox()
        self._running = trio.CancelScope()
        self._dropped = False
        self._stream: RpcStream | None = None
        self._retired = False  # accepts no further calls; ends with the last one

    async def request(self, request: Request) -> Reply:
        """Send a request and wait for its answer. The task that watches `calls.due` calls `expire`.

        Also raises errors of a payload's producer, after which the channel is unusable.
        """
        waiting = _Waiting(request)
        call_id = self.calls.add(request.deadline, waiting)
        if call_id is None:
            raise Overloaded(f"{len(self.calls)} calls to this peer wait already", 0.1, self._peer)
        if request.frames:
            message = encode_request(wire.REQUEST, call_id, request)
            self._outbox.put(*message)
            with trio.CancelScope() as waiting.feeding:
                await self._outbox.feed(message)
        else:
            self._outbox.put(encode_call(wire.REQUEST, call_id, request.name, request.timeout_s, request.body))
        try:
            return await waiting.wait(lambda: self._give_up(call_id))
        finally:
            self._close_retired()

    def _give_up(self, call_id: int) -> None:
        self.calls.pop(call_id)
        self._outbox.put(encode_message(wire.CANCEL, call_id))

    def expire(self, now: float) -> None:
        """Fail the calls whose deadlines have passed."""
        for call_id, waiting in self.calls.overdue(now):
            waiting.fail(waiting.request.too_slow(self._peer))
            self._outbox.put(encode_message(wire.CANCEL, call_id))
            self.doubt()

    def doubt(self) -> None:
        """Report an overdue call, so that the link checks whether the peer is still there."""
        if self._stream is not None:
            self._stream.doubt()

    @property
    def busy(self) -> bool:
        """True while a call waits or a request is not completely sent; also if the channel is over."""
        return self.over or len(self.calls) > 0 or self._outbox.pending or self._outbox.closed

    @property
    def superseded(self) -> bool:
        """True if a new channel to the peer would take a better path."""
        return self._stream is not None and self._stream.superseded

    def retire(self) -> None:
        """Close as soon as no call waits."""
        self._retired = True
        self._close_retired()

    def _close_retired(self) -> None:
        if self._retired and not self.over and not self.calls:
            self.close()

    def close(self) -> None:
        """Close the stream; only while no call waits."""
        self.over = True
        self._running.cancel()

    def drop(self) -> None:
        """Reset the stream, which cancels the calls on it, including calls whose frames are not completely sent."""
        self._dropped = True
        self.close()

    async def run(self, open_stream: OpenStream, tasks: Tasks) -> None:
        """Open the stream, read answers until it ends, then fail all waiting calls."""
        failure: RemoteError = Unreachable("the stream was closed", self._peer)
        stream: RpcStream | None = None
        try:
            with self._running:
                stream = self._stream = opened = await open_stream()
                tasks.start(lambda: self._outbox.run(opened), lambda: f"calls to {self._peer.short}", opened.reset)
                await self._read(opened)
        except RemoteError as error:
            failure = error.blame(self._peer)
        finally:
            self.over = True
            if self._running.cancelled_caught and not self._dropped and not self._outbox.closed:
                self._outbox.end()
            else:
                self._outbox.close()
                if stream is not None:
                    stream.reset()
            for waiting in self.calls.drain():
                waiting.fail(renewed(failure))

    async def _read(self, stream: RpcStream) -> None:
        share = Share(self._room, asked(user_of(stream)), demanding=False)
        inbound = Inbound(stream, self._settle, self._rates, share)
        try:
            while messages := await inbound.batch():
                for message in messages:
                    if message.headers:
                        await self._reply_with_frames(message, inbound)
                    else:
                        self._settle(message)
                await trio.lowlevel.checkpoint()
        finally:
            inbound.close()

    def _settle(self, message: RpcMessage) -> bool:
        """Complete a call by an answer without frames."""
        if message.kind == wire.REPLY:
            waiting = self.calls.pop(message.id)
            if waiting is not None:
                waiting.set((message.body, ()))
        elif message.kind == wire.ERROR:
            error = decode_failure(message.body, self._peer)
            waiting = self.calls.pop(message.id)
            if waiting is not None:
                waiting.fail(error)
        else:
            raise ProtocolViolation(f"a message of kind {message.kind} for a unary call")
        self.used = trio.current_time()
        return True

    async def _reply_with_frames(self, message: RpcMessage, inbound: Inbound) -> None:
        if message.kind != wire.REPLY:
            raise ProtocolViolation(f"a message of kind {message.kind} for a unary call")
        waiting = self.calls.get(message.id)
        if waiting is None:
            await inbound.skip()
            return
        waiting.request.check(message)
        self.answers_with_frames.add(waiting.request.name)
        try:
            frames = await inbound.frames(message, waiting.request.deadline)
        except (Overloaded, TooSlow) as error:
            self.calls.pop(message.id)
            waiting.fail(error.blame(self._peer))
            await inbound.skip()
            return
        inbound.share.give(message.frame_bytes)
        self.calls.pop(message.id)
        waiting.set((message.body, frames))
