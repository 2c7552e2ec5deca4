"""Reading the messages of one stream, for callers and servers alike. Writing is in `outbox`.

`Inbound` receives no more than the peer's share of the host's memory allows, and gives up on incomplete messages and on
payloads that arrive too slowly. `Slot` passes one value from the reader to the task that waits for it.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import outcome
import trio

from peerd.codec.format.frame import FrameHeader, TensorFrame
from peerd.core.errors import Overloaded, ProtocolViolation, RemoteError, TooSlow
from peerd.core.limits import (
    RPC_FREE_STREAM_BYTES,
    RPC_LEAST_BYTES_PER_S,
    RPC_MESSAGE_S,
    RPC_STALL_S,
    RPC_STEP_BYTES,
)
from peerd.rpc.methods.message_codec import MessageParser, RpcMessage
from peerd.rpc.room import Share
from peerd.rpc.rpc_types import RpcStream
from peerd.wire.rate.arrival_rate import LineRates

_QUICK_MESSAGES = 64  # handled at once, before other tasks run

# A bytearray that is not zeroed: the system allocates pages of a large one only when bytes are written.
_untouched = ctypes.pythonapi.PyByteArray_FromStringAndSize
_untouched.argtypes, _untouched.restype = (ctypes.c_char_p, ctypes.c_ssize_t), ctypes.py_object

T = TypeVar("T")
# Buffers for the payloads of a message, one of the right size for each frame, or None to allocate them.
Place = Callable[[tuple[FrameHeader, ...]], Sequence[memoryview] | None]


class Slot(Generic[T]):
    """A slot in which one task waits for one value or error."""

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
        """Return the value or raise the error. `on_cancel` is called if the waiting task is cancelled first."""
        if self._result is not None:
            await trio.lowlevel.checkpoint()
            return self._result.unwrap()

        self._task = trio.lowlevel.current_task()
        try:
            value: T = await trio.lowlevel.wait_task_rescheduled(self._abort)
        except trio.Cancelled:
            # Not in `_abort`: a cancellation aborts tasks in the order of memory addresses, which is not reproducible.
            if self._result is None:
                on_cancel()
            raise
        return value

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


class Inbound:
    """The messages of one stream, as they arrive.

    Each message without frames is offered to `quick` on arrival, in the task that received it. `quick` handles it and
    returns True, or returns False: then it and the following messages are returned by `batch`. `rates` records the rate
    of payloads. All bytes of a message, even an incomplete one, are reserved in `share`.
    """

    def __init__(self, stream: RpcStream, quick: Callable[[RpcMessage], bool], rates: LineRates, share: Share) -> None:
        self.share = share
        self._stream = stream
        self._quick = quick
        self._rates = rates
        self._parser = MessageParser()
        self._left: list[RpcMessage] = []  # not handled by `quick`
        self._fault: Exception | None = None
        self._half = trio.CancelScope()  # scope of a receive; its deadline is that of the incomplete message
        self._half_since = math.inf
        self._half_bytes = 0  # reserved for that message
        self._pay: Payment | None = None  # for the payloads being received
        self._patient = False  # whether these may arrive at any rate
        self._landing = trio.CancelScope()  # scope of their receive; cancelling it loses no bytes
        self._first: tuple[float, int] | None = None  # (time of the first piece of a payload, `_total` at that time)
        self._total = 0  # payload bytes of this peer, on all streams

    def begin(self, head: bytes) -> None:
        """Process a message's head that was received before anything else."""
        self._left = self._parser.feed(head)

    async def batch(self) -> list[RpcMessage]:
        """The next messages that `quick` did not handle; [] at the end. The last may have frames: read or skip them.

        Raises Overloaded if no memory can be reserved for a message, TooSlow if its rest does not arrive; the stream is
        then unusable.
        """
        messages = [*self._left, *self._parser.feed(b"")]
        self._left = []
        if messages:
            return messages
        self._half_since = math.inf  # time without a reader does not count
        more = True
        while more and not self._left:
            await self._pay_for_half()
            with trio.CancelScope() as self._half:
                self._time_half(complete=True)
                more = await self._stream.receive_each(self._take)
            if self._half.cancelled_caught:
                raise TooSlow("the rest of an incomplete message did not arrive in time", self._stream.peer)
            if self._fault is not None:
                raise self._fault
        if not more and not self._parser.clean:
            raise ProtocolViolation("the stream ended in the middle of a message", self._stream.peer)
        messages, self._left = self._left, []
        return messages

    def close(self) -> None:
        """Release the memory reserved for an incomplete message; nothing more is read."""
        self.share.give(self._half_bytes)
        self._half_bytes = 0

    def _take(self, data: bytes) -> bool:
        # Often runs in the link's own task, which our errors must not end: the reader's task raises them.
        try:
            messages = self._parser.feed(data)
            for at, message in enumerate(messages):
                if message.headers or at == _QUICK_MESSAGES or not self._quick(message):
                    self._left = messages[at:]
                    break
            if self._half_bytes or self._half_since < math.inf or self._parser.partial[0]:
                self._time_half(complete=bool(messages))
                return not self._left and self._paid_for_half()
        except Exception as error:
            self._fault = error
            return False
        return not self._left

    def _time_half(self, complete: bool) -> None:
        """Set the deadline of an incomplete message, from its beginning. `complete`: whole messages preceded it."""
        have, need = self._parser.partial
        if not have:
            self._half_since = self._half.deadline = math.inf
            return
        if complete or self._half_since == math.inf:
            self._half_since = trio.current_time()
        self._half.deadline = self._half_since + RPC_MESSAGE_S + need / RPC_LEAST_BYTES_PER_S

    def _paid_for_half(self) -> bool:
        have = self._parser.partial[0]
        due = have - RPC_FREE_STREAM_BYTES if have > RPC_FREE_STREAM_BYTES else 0
        if due < self._half_bytes:
            self.share.give(self._half_bytes - due)
        elif due > self._half_bytes and self.share.take(due - self._half_bytes) is not None:
            return False
        self._half_bytes = due
        return True

    async def _pay_for_half(self) -> None:
        if not self._paid_for_half():
            due = self._parser.partial[0] - RPC_FREE_STREAM_BYTES
            await self.share.wait(due - self._half_bytes)
            self._half_bytes = due

    async def frames(
        self, message: RpcMessage, deadline: float, place: Place | None = None, patient: bool = False
    ) -> tuple[TensorFrame, ...]:
        """Receive the frames of `message`; their memory stays reserved until the caller releases it in `share`.

        `place` may provide buffers for the payloads; otherwise new memory is allocated. `patient`: they belong to the
        current round and may arrive at any rate. Raises Overloaded or TooSlow if there is no memory or no time for
        them: then `skip` them or drop the stream.
        """
        self._pay = pay = Payment(self.share, message)
        self._patient = patient or self.share.patient
        try:
            with trio.CancelScope(deadline=deadline):
                into = place(message.headers) if place is not None else None
                if into is None:
                    into = [_memory(header.payload_bytes) for header in message.headers]
                buffers = self._parser.accept(into)
                pay.came_bytes = message.payload_bytes - self._parser.wanted
                await self._receive()
                await pay.whole()
                self._pay = None
                return tuple(map(_frame, message.headers, buffers))
        finally:
            if self._pay is not None:
                self._pay = None
                pay.back()
        raise TooSlow("the deadline passed while frames were received")

    def be_patient(self) -> None:
        """Accept any rate for the frames that arrive now."""
        self._patient = True

    async def skip(self) -> None:
        """Skip the payloads of the current message, or what is missing of them."""
        self._parser.skip()
        await self._receive()

    async def _receive(self) -> None:
        parser, self._first = self._parser, None
        while parser.wanted:
            if (room := parser.room()) is not None and self._pay is not None:
                await self._receive_into(room, self._pay)
                continue
            data = await self._stream.receive_view(parser.wanted)
            if not data:
                raise ProtocolViolation("the stream ended in the middle of a frame", self._stream.peer)
            self._count(len(data))
            parser.fill(data)
        if self._first is not None:
            first_at, first_total = self._first
            self._rates.arrived(self._stream.peer, self._total - first_total, trio.current_time() - first_at)

    async def _receive_into(self, room: memoryview, pay: Payment) -> None:
        """Fill `room`, as long as memory can be reserved and bytes arrive fast enough."""
        if pay.due_bytes:
            await pay.next()
        with trio.CancelScope(deadline=trio.current_time() + pay.patience_s) as self._landing:
            await self._stream.receive_into(room, self._landed)
        if self._landing.cancelled_caught and not pay.due_bytes and not self._patient:
            raise TooSlow(f"{pay.came_bytes} bytes of frames arrived, the following ones too slowly")

    def _landed(self, size: int) -> None:
        self._count(size)
        self._parser.filled(size)
        pay = self._pay
        if pay is not None:
            pay.came_bytes += size
            if pay.due_bytes:
                if pay.next_nowait():
                    self._landing.deadline = trio.current_time() + pay.patience_s
                else:
                    self._landing.cancel()

    def _count(self, size: int) -> None:
        self._total = self._rates.count(self._stream.peer, size)
        if self._first is None:
            self._first = trio.current_time(), self._total


class Payment:
    """Reserves memory for one message's frames: a step ahead of the bytes that arrive, and all of it at the end."""

    __slots__ = ("_share", "_total_bytes", "came_bytes", "paid_bytes")

    def __init__(self, share: Share, message: RpcMessage) -> None:
        self.came_bytes = 0  # of the payloads
        self.paid_bytes = 0
        self._share = share
        self._total_bytes = message.frame_bytes

    @property
    def due_bytes(self) -> int:
        """Bytes to reserve before more is received."""
        left = self._total_bytes - self.paid_bytes
        if self.came_bytes < self.paid_bytes or not left:
            return 0
        return min(left, max(RPC_STEP_BYTES, self.came_bytes - self.paid_bytes))

    @property
    def patience_s(self) -> float:
        """Seconds allowed until the next step is due."""
        return RPC_STALL_S + (self.paid_bytes - self.came_bytes) / RPC_LEAST_BYTES_PER_S

    def next_nowait(self) -> bool:
        due = self.due_bytes
        if self._share.take(due) is not None:
            return False
        self.paid_bytes += due
        return True

    async def next(self) -> None:
        """Reserve what is due. Raises Overloaded if the memory does not become free soon."""
        due = self.due_bytes
        await self._share.wait(due)
        self.paid_bytes += due

    async def whole(self) -> None:
        """Reserve the rest once all has arrived, including the unpacked size."""
        left = self._total_bytes - self.paid_bytes
        if left:
            await self._share.wait(left)
            self.paid_bytes = self._total_bytes

    def back(self) -> None:
        self._share.give(self.paid_bytes)
        self.paid_bytes = 0


def _memory(size: int) -> memoryview:
    """Memory for a payload that has not arrived yet. A large one uses no physical memory before bytes are written."""
    return memoryview(bytearray(size) if size <= RPC_FREE_STREAM_BYTES else _untouched(None, size))


def _frame(header: FrameHeader, payload: bytearray | memoryview) -> TensorFrame:
    return TensorFrame(header.dtype, header.shape, payload, header.coding, header.block, header.lossless)


def renewed(error: RemoteError) -> RemoteError:
    """A copy of the error, so that each waiting task raises its own, with its own traceback."""
    text = str(error.args[0])
    if isinstance(error, Overloaded):
        return Overloaded(text, error.retry_after_s, error.peer)
    return type(error)(text, error.peer, error.cause)
