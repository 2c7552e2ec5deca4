"""Reading and writing the messages of one stream: the parts that callers and servers share.

`Outbox` has one writer per stream, so that no cancelled task leaves half a message behind, and messages queued
together leave together. `Inbound` receives payloads only after the peer's share of the byte budget was taken.
`Slot` hands one value from the reader to the task that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import outcome
import trio

from peerd.core.errors import Overloaded, ProtocolViolation, RemoteError, TooSlow
from peerd.core.frame import FrameHeader, TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_BUDGET_WAIT_S, RPC_OUTBOX_BYTES
from peerd.machine.rpc import Buffer, Message, MessageParser
from peerd.machine.rpc_calls import ByteBudget
from peerd.service.rpc_types import RpcStream

_QUICK_MESSAGES = 64  # handled in one go; the loop turns before the next
_JOIN_BYTES = 8 << 10  # a message up to this size is copied together, payloads and all
_BATCH_BYTES = 32 << 10  # buffers below this are joined before they are sent; larger ones are not copied

T = TypeVar("T")


class Slot(Generic[T]):
    """One task waits here for one value or error."""

    __slots__ = ("_result", "_task")

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None
        self._result: outcome.Value[T] | outcome.Error | None = None

    def set(self, value: T) -> None:
        self._settle(outcome.Value(value))

    def fail(self, error: Exception) -> None:
        self._settle(outcome.Error(error))

    def _settle(self, result: outcome.Value[T] | outcome.Error) -> None:
        if self._result is None:
            self._result = result
            if self._task is not None:
                trio.lowlevel.reschedule(self._task, result)
                self._task = None

    async def wait(self, on_cancel: Callable[[], None]) -> T:
        """The value, or the error raised; `on_cancel` is called when the waiting task is cancelled first."""
        if self._result is not None:
            await trio.lowlevel.checkpoint()
            return self._result.unwrap()

        self._task = trio.lowlevel.current_task()
        try:
            value: T = await trio.lowlevel.wait_task_rescheduled(self._abort)
        except trio.Cancelled:
            # Here and not in `_abort`: the order in which one cancellation aborts tasks follows memory addresses.
            if self._result is None:
                on_cancel()
            raise
        return value

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Outbox:
    """Messages that wait to be written to one stream. Anyone puts, `run` alone writes.

    Bounded by those who put: they wait for `room` (or `flushed`) before the next message.
    """

    def __init__(self) -> None:
        self._queue: deque[Buffer] = deque()
        self._put_bytes = 0
        self._sent_bytes = 0
        self._stream: RpcStream | None = None
        self._writer: trio.lowlevel.Task | None = None  # set while it has nothing to write
        self._waiting = trio.lowlevel.ParkingLot()
        self._ending = False
        self.closed = False

    def put(self, *buffers: Buffer) -> None:
        """Send one whole message now or soon; dropped when the stream is over, which its reader will notice."""
        if self.closed:
            return
        if len(buffers) > 1 and sum(map(len, buffers)) <= _JOIN_BYTES:
            buffers = (b"".join(buffers),)
        if len(buffers) == 1 and self._writer is not None and self._send_now(buffers[0]):
            return
        for buffer in buffers:
            if buffer:
                self._put_bytes += len(buffer)
                self._queue.append(buffer)
        self._wake()

    @property
    def full(self) -> bool:
        """Whether so much is queued that whoever puts must wait for `room`."""
        return self._put_bytes - self._sent_bytes > RPC_OUTBOX_BYTES

    @property
    def pending(self) -> bool:
        """Whether anything put was not yet taken by the stream."""
        return self._sent_bytes < self._put_bytes

    async def room(self) -> None:
        """Wait until little enough is queued; returns at once after `close`."""
        while self.full and not self.closed:
            await self._waiting.park()

    async def flushed(self) -> None:
        """Wait until everything put so far was taken by the stream; returns at once after `close`."""
        goal = self._put_bytes
        while self._sent_bytes < goal and not self.closed:
            await self._waiting.park()

    async def ended(self) -> None:
        """Wait until the writer has stopped."""
        while not self.closed:
            await self._waiting.park()

    def end(self) -> None:
        """Write what is queued, then close our side of the stream."""
        self._ending = True
        self._wake()

    def close(self) -> None:
        """Write nothing more."""
        self.closed = True
        self._queue.clear()
        self._wake()
        self._waiting.unpark_all()

    async def run(self, stream: RpcStream) -> None:
        """The writer."""
        self._stream = stream
        try:
            while not self.closed:
                if self._queue:
                    batch = self._take()
                    await stream.send(batch)
                    self._sent_bytes += len(batch)
                    if self._waiting:
                        self._waiting.unpark_all()
                elif self._ending:
                    await stream.aclose()
                    return
                else:
                    await self._sleep()
        except RemoteError:
            pass  # the reader of the same stream learns it too, and tells who waits
        except trio.Cancelled:
            stream.reset()  # the service stops: the other side need not wait for its deadlines
            raise
        finally:
            self.close()

    def _send_now(self, message: Buffer) -> bool:
        """While the writer rests, a small message need not wait for it: that is half the latency of a call."""
        return self._stream is not None and isinstance(message, bytes) and self._stream.send_nowait(message)

    def _take(self) -> Buffer:
        """The next large buffer, or as many small ones as make up a batch."""
        first = self._queue.popleft()
        if not self._queue or len(first) >= _BATCH_BYTES:
            return first
        batch, size = [first], len(first)
        while self._queue and size + len(self._queue[0]) <= _BATCH_BYTES:
            size += len(self._queue[0])
            batch.append(self._queue.popleft())
        return b"".join(batch)

    def _wake(self) -> None:
        if self._writer is not None:
            trio.lowlevel.reschedule(self._writer)
            self._writer = None

    async def _sleep(self) -> None:
        def abort(_: object) -> trio.lowlevel.Abort:
            self._writer = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._writer = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(abort)


class SharedBudget:
    """A ByteBudget that tasks can wait for."""

    def __init__(self, books: ByteBudget) -> None:
        self.books = books
        self._waiting = trio.lowlevel.ParkingLot()

    async def take(self, peer: PeerId, count: int) -> None:
        """Hold `count` bytes for `peer`; Overloaded when there is no room for them soon."""
        if self.books.take(peer, count):
            return
        with trio.move_on_after(RPC_BUDGET_WAIT_S):
            while not self.books.take(peer, count):
                await self._waiting.park()
            return
        raise Overloaded("too many bytes are being received", RPC_BUDGET_WAIT_S)

    def give(self, peer: PeerId, count: int) -> None:
        """Let go of `count` bytes."""
        if count:
            self.books.give(peer, count)
            self._waiting.unpark_all()


class Inbound:
    """The messages of one stream, as they arrive.

    `quick` is offered each message without frames as soon as it has come, in the task that received it. It handles
    the message and returns True, or leaves it alone and returns False: then it and those after it come in `batch`.
    """

    def __init__(self, stream: RpcStream, quick: Callable[[Message], bool]) -> None:
        self._stream = stream
        self._quick = quick
        self._parser = MessageParser()
        self._left: list[Message] = []  # not handled by `quick`
        self._fault: ProtocolViolation | None = None

    async def batch(self) -> list[Message]:
        """The next messages that need more time; [] at the end. The last may have frames: read or skip them."""
        messages = self._parser.feed(b"")
        if messages:
            return messages
        more = await self._stream.receive_each(self._take)
        if self._fault is not None:
            raise self._fault
        if not more and not self._parser.clean:
            raise ProtocolViolation("the stream ended in the middle of a message", self._stream.peer)
        messages, self._left = self._left, []
        return messages

    def _take(self, data: bytes) -> bool:
        try:
            messages = self._parser.feed(data)
            for at, message in enumerate(messages):
                if message.headers or at == _QUICK_MESSAGES or not self._quick(message):
                    self._left = messages[at:]
                    return False
        except ProtocolViolation as error:
            self._fault = error
            return False
        return True

    async def frames(self, message: Message, budget: SharedBudget, deadline: float) -> tuple[TensorFrame, ...]:
        """The frames of `message`; until `budget.give`, their bytes are held in the budget.

        Raises Overloaded or TooSlow when there is no room or no time for them: then `skip` them, or drop the stream.
        """
        peer, held_bytes = self._stream.peer, 0
        try:
            with trio.CancelScope(deadline=deadline):
                await budget.take(peer, message.frame_bytes)
                held_bytes = message.frame_bytes
                buffers = self._parser.accept()
                await self._receive()
                held_bytes = 0  # the caller's, from here
                return tuple(map(_frame, message.headers, buffers))
        finally:
            budget.give(peer, held_bytes)
        raise TooSlow("the deadline passed while frames were received")

    async def skip(self) -> None:
        """Pass over the payloads of the message that waits for them, or over what is missing of them."""
        self._parser.skip()
        await self._receive()

    async def _receive(self) -> None:
        while self._parser.wanted:
            data = await self._stream.receive_view(self._parser.wanted)
            if not data:
                raise ProtocolViolation("the stream ended in the middle of a frame", self._stream.peer)
            self._parser.fill(data)


def _frame(header: FrameHeader, payload: bytearray) -> TensorFrame:
    return TensorFrame(header.dtype, header.shape, payload, header.coding, header.block, header.lossless)


def renewed(error: RemoteError) -> RemoteError:
    """The same error as a new object: each task that waits raises its own, with its own traceback."""
    text = str(error.args[0])
    if isinstance(error, Overloaded):
        return Overloaded(text, error.retry_after_s, error.peer)
    return type(error)(text, error.peer)
