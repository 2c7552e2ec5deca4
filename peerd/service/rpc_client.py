"""Making calls: the stream that a peer's small calls share, and the stream of its own that a large call takes.

A `Channel` is opened by the first call and used by all until it is lost or nobody used it for a while. Requests made
in one turn of the loop leave in one write. Answers may come in any order. A call that is cancelled or too late tells
the other side. Answers with frames hold up the others on a shared stream: the channel remembers the methods that
gave some, and their next calls get a stream of their own.

A hostile peer may: answer what was never asked, answer with more than was allowed, never answer. The first two cost
it the channel; the third costs each caller its own time-out, and RPC_PENDING calls at most wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from peerd.core.errors import Overloaded, ProtocolViolation, RemoteError, TooSlow, Unreachable
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.machine import rpc as wire
from peerd.machine.rpc import Message, decode_failure, encode_call, encode_frames, encode_message
from peerd.machine.rpc_calls import PendingCalls
from peerd.service.rpc_io import Inbound, Outbox, SharedBudget, Slot, renewed
from peerd.service.rpc_parts import CallStream
from peerd.service.rpc_types import RpcStream

Reply = tuple[bytes, tuple[TensorFrame, ...]]  # the body, still encoded, and the frames
OpenStream = Callable[[], Awaitable[RpcStream]]


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked, encoded; `deadline` in trio time."""

    name: bytes
    body: bytes
    frames: Sequence[TensorFrame]
    timeout_s: float
    deadline: float
    reply_frame_bytes: int  # most that the answer's frames may take

    def too_slow(self, peer: PeerId) -> TooSlow:
        return TooSlow(f"no answer to {self.name.decode()} within {self.timeout_s:g} s", peer)

    def check(self, message: Message) -> None:
        """ProtocolViolation when an answer's frames are more than the caller takes."""
        if message.payload_bytes > self.reply_frame_bytes:
            size = f"{message.payload_bytes} bytes; allowed: {self.reply_frame_bytes}"
            raise ProtocolViolation(f"an answer to {self.name.decode()} with frames of {size}")


class _Waiting(Slot[Reply]):
    """A call that waits for its answer."""

    __slots__ = ("request",)

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.request = request


class Channel:
    """The calls to one service of one peer that share a stream."""

    def __init__(self, peer: PeerId, budget: SharedBudget) -> None:
        self.calls: PendingCalls[_Waiting] = PendingCalls()
        self.answers_with_frames: set[bytes] = set()  # names of methods
        self.used = trio.current_time()
        self._peer = peer
        self._budget = budget
        self._outbox = Outbox()
        self._running = trio.CancelScope()

    async def request(self, request: Request) -> Reply:
        """Ask, and wait for the answer. The one who watches `calls.due` calls `expire`."""
        waiting = _Waiting(request)
        call_id = self.calls.add(request.deadline, waiting)
        if call_id is None:
            raise Overloaded(f"{len(self.calls)} calls to it wait already", 0.1, self._peer)
        self._outbox.put(encode_call(wire.REQUEST, call_id, request.name, request.timeout_s, request.body))
        return await waiting.wait(lambda: self._give_up(call_id))

    def _give_up(self, call_id: int) -> None:
        self.calls.pop(call_id)
        self._outbox.put(encode_message(wire.CANCEL, call_id))

    def expire(self, now: float) -> None:
        """Fail the calls whose time has passed."""
        for call_id, waiting in self.calls.overdue(now):
            waiting.fail(waiting.request.too_slow(self._peer))
            self._outbox.put(encode_message(wire.CANCEL, call_id))

    def close(self) -> None:
        """Close the stream; only when no call waits."""
        self._running.cancel()

    async def run(self, open_stream: OpenStream, nursery: trio.Nursery) -> None:
        """Open the stream, read answers until it ends, then fail whoever still waits."""
        failure: RemoteError = Unreachable("the stream was closed", self._peer)
        stream: RpcStream | None = None
        try:
            with self._running:
                stream = await open_stream()
                nursery.start_soon(self._outbox.run, stream)
                await self._read(stream)
        except RemoteError as error:
            failure = error.blame(self._peer)
        finally:
            if self._running.cancelled_caught:
                self._outbox.end()
            else:
                self._outbox.close()
                if stream is not None:
                    stream.reset()
            for waiting in self.calls.drain():
                waiting.fail(renewed(failure))

    async def _read(self, stream: RpcStream) -> None:
        inbound = Inbound(stream, self._settle)
        while messages := await inbound.batch():
            for message in messages:
                if message.headers:
                    await self._reply_with_frames(message, inbound)
                else:
                    self._settle(message)
            await trio.lowlevel.checkpoint()

    def _settle(self, message: Message) -> bool:
        """An answer without frames."""
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

    async def _reply_with_frames(self, message: Message, inbound: Inbound) -> None:
        if message.kind != wire.REPLY:
            raise ProtocolViolation(f"a message of kind {message.kind} for a unary call")
        waiting = self.calls.get(message.id)
        if waiting is None:
            await inbound.skip()
            return
        waiting.request.check(message)
        self.answers_with_frames.add(waiting.request.name)
        try:
            frames = await inbound.frames(message, self._budget, waiting.request.deadline)
        except (Overloaded, TooSlow) as error:
            self.calls.pop(message.id)
            waiting.fail(error.blame(self._peer))
            await inbound.skip()
            return
        self._budget.give(self._peer, message.payload_bytes)
        self.calls.pop(message.id)
        waiting.set((message.body, frames))


class LargeCall:
    """A call on a stream of its own: with frames, or with parts in both directions."""

    def __init__(self, stream: RpcStream, budget: SharedBudget, request: Request) -> None:
        self.peer = stream.peer
        self._stream = stream
        self._budget = budget
        self._request = request
        self._outbox = Outbox()
        self._running = trio.CancelScope()
        self.reply: Slot[Reply] = Slot()
        self.parts: CallStream | None = None
        self._complete = False  # the other side has said all

    def start(self, streaming: bool, nursery: trio.Nursery) -> None:
        """Send the request, and read what comes, in tasks of `nursery` that `close` ends."""
        request = self._request
        headers, payloads = encode_frames(request.frames) if request.frames else (b"", [])
        if streaming:
            self.parts = CallStream(self.peer, 1, self._outbox, self._budget)
        kind = wire.OPEN if streaming else wire.REQUEST
        start = encode_call(kind, 1, request.name, request.timeout_s, request.body, headers, len(payloads))
        self._outbox.put(start, *payloads)
        nursery.start_soon(self._outbox.run, self._stream)
        nursery.start_soon(self._read)

    def close(self) -> None:
        """The caller wants nothing more: a call that is not complete is cancelled on the other side."""
        self._running.cancel()
        if self._complete and not self._outbox.pending:
            self._outbox.end()
        else:
            self._outbox.close()
            self._stream.reset()
        if self.parts is not None:
            self.parts.discard()

    async def _read(self) -> None:
        inbound = Inbound(self._stream, self._settle)
        try:
            with self._running:
                while messages := await inbound.batch():
                    for message in messages:
                        if message.headers or not self._settle(message):
                            await self._take(message, inbound)
                if not self._complete:
                    raise Unreachable("the stream was closed before the call had ended")
        except RemoteError as error:
            if not self._complete:
                self._fail(error.blame(self.peer))

    def _settle(self, message: Message) -> bool:
        """What ends a call, without frames; False when it is something else."""
        kind = message.kind
        if message.id != 1 or self._complete:
            raise ProtocolViolation("an answer that nobody asked for")
        if kind == wire.ERROR:
            self._fail(decode_failure(message.body, self.peer))
        elif kind == wire.END and self.parts is not None:
            self.parts.no_more_parts()
        elif kind == wire.REPLY and self.parts is None:
            self.reply.set((message.body, ()))
        elif kind == wire.PART and self.parts is not None:
            return False
        else:
            raise ProtocolViolation(f"a message of kind {kind} that does not fit the call")
        self._complete = True
        return True

    async def _take(self, message: Message, inbound: Inbound) -> None:
        """A part, or an answer with frames."""
        if message.id != 1 or self._complete:
            raise ProtocolViolation("an answer that nobody asked for")
        self._request.check(message)
        if self.parts is not None and message.kind == wire.PART:
            await self.parts.take(message, inbound, self._request.deadline)
        elif self.parts is None and message.kind == wire.REPLY:
            frames = await inbound.frames(message, self._budget, self._request.deadline)
            self._budget.give(self.peer, message.payload_bytes)
            self._complete = True
            self.reply.set((message.body, frames))
        else:
            raise ProtocolViolation(f"a message of kind {message.kind} that does not fit the call")

    def _fail(self, error: RemoteError) -> None:
        self.reply.fail(error)
        if self.parts is not None:
            self.parts.fail(error)
            self._outbox.close()  # wakes a sender, who then sees the failure
