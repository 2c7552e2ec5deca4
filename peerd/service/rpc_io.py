"""Reading the messages of one stream: the parts that callers and servers share. Writing is rpc_outbox's.

`Inbound` receives payloads only after the peer's share of the byte budget was taken. `Slot` hands one value from the
reader to the task that waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import outcome
import trio

from peerd.core.errors import Overloaded, ProtocolViolation, RemoteError, TooSlow
from peerd.core.frame import FrameHeader, TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_BUDGET_WAIT_S
from peerd.machine.linkrate import LineRates
from peerd.machine.rpc import Message, MessageParser
from peerd.machine.rpc_calls import ByteBudget
from peerd.service.rpc_types import RpcStream

_QUICK_MESSAGES = 64  # handled in one go; the loop turns before the next

T = TypeVar("T")
# Where the payloads of a message go, one buffer of the right size for each frame; None: wherever there is room.
Place = Callable[[tuple[FrameHeader, ...]], Sequence[memoryview] | None]


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
    How fast payloads come goes to `rates`.
    """

    def __init__(self, stream: RpcStream, quick: Callable[[Message], bool], rates: LineRates) -> None:
        self._stream = stream
        self._quick = quick
        self._rates = rates
        self._parser = MessageParser()
        self._left: list[Message] = []  # not handled by `quick`
        self._fault: ProtocolViolation | None = None
        self._first: tuple[float, int] | None = None  # when the first piece of a payload came, and `_total` then
        self._total = 0  # payload bytes of this peer, by all streams

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

    async def frames(
        self, message: Message, budget: SharedBudget, deadline: float, place: Place | None = None
    ) -> tuple[TensorFrame, ...]:
        """The frames of `message`; until `budget.give`, their bytes are held in the budget.

        `place` may say where their payloads go; else they lie in memory of their own.
        Raises Overloaded or TooSlow when there is no room or no time for them: then `skip` them, or drop the stream.
        """
        peer, held_bytes = self._stream.peer, 0
        try:
            with trio.CancelScope(deadline=deadline):
                await budget.take(peer, message.frame_bytes)
                held_bytes = message.frame_bytes
                buffers = self._parser.accept(place(message.headers) if place is not None else None)
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
        parser, self._first = self._parser, None
        while parser.wanted:
            if (room := parser.room()) is not None:
                await self._stream.receive_into(room, self._landed)
                continue
            data = await self._stream.receive_view(parser.wanted)
            if not data:
                raise ProtocolViolation("the stream ended in the middle of a frame", self._stream.peer)
            self._count(len(data))
            parser.fill(data)
        if self._first is not None:
            first_at, first_total = self._first
            self._rates.arrived(self._stream.peer, self._total - first_total, trio.current_time() - first_at)

    def _landed(self, size: int) -> None:
        self._count(size)
        self._parser.filled(size)

    def _count(self, size: int) -> None:
        self._total = self._rates.count(self._stream.peer, size)
        if self._first is None:
            self._first = trio.current_time(), self._total


def _frame(header: FrameHeader, payload: bytearray | memoryview) -> TensorFrame:
    return TensorFrame(header.dtype, header.shape, payload, header.coding, header.block, header.lossless)


def renewed(error: RemoteError) -> RemoteError:
    """The same error as a new object: each task that waits raises its own, with its own traceback."""
    text = str(error.args[0])
    if isinstance(error, Overloaded):
        return Overloaded(text, error.retry_after_s, error.peer)
    return type(error)(text, error.peer)
