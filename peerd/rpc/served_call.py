"""One call being served: runs the handler, answers once, and releases the resources of the call.

For its caller, a call ends in exactly one way: answered, failed (its error is sent), or cancelled (nothing is sent).
Its slots in the method's load and in the book, and its memory, are released once: when the handler has really ended and
the answer's frames are being sent. So a caller cannot exceed its share by cancelling calls or by not reading answers.
If a caller has too many unread answers, a further answer is dropped and the call fails with Overloaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import trio

from peerd.codec.format.frame import FrameHeader, TensorFrame
from peerd.core.errors import LocalError, Overloaded, PeerdError, Refused, TooSlow
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_LEAST_BYTES_PER_S, RPC_MESSAGE_S, RPC_STALL_S
from peerd.messages.encoding import encode
from peerd.rpc.call_stream import CallStream
from peerd.rpc.methods.message_codec import REPLY, RpcMessage, encode_failure, encode_message
from peerd.rpc.methods.method_load import MethodLoad, MethodName
from peerd.rpc.outbox import Outbox, outgoing
from peerd.rpc.room import Share
from peerd.rpc.rpc_types import Answer, Incoming
from peerd.rpc.task_pool import PoolWorker
from peerd.wire.budget.book import User

UnaryHandler = Callable[[Incoming[Any]], Awaitable[Answer[Any]]]
Objection = Callable[[PeerId, Any], PeerdError | None]
FramesObjection = Callable[[PeerId, tuple[FrameHeader, ...]], PeerdError | None]
StreamHandler = Callable[[Incoming[Any], CallStream], Awaitable[None]]


@dataclass(slots=True)
class Method:
    """A served method: its signature, declaration and load. One of the handlers is set.

    `objection` returns the error for a request that is refused by its body alone, before its frames are received;
    `frames_objection` does so by the frames' headers.
    """

    name: MethodName
    request: type[msgspec.Struct]
    load: MethodLoad
    unary: UnaryHandler | None = None
    streaming: StreamHandler | None = None
    objection: Objection | None = None
    frames_objection: FramesObjection | None = None
    under_way: dict[ServedCall, None] = field(default_factory=dict)  # oldest first


class Caller(Protocol):
    """The stream on which a call arrived."""

    peer: PeerId
    user: User
    outbox: Outbox
    share: Share

    def note_failure(self, error: PeerdError) -> None:
        """Record a failed call: an invalid proof counts against the caller."""
        ...

    def moved_bytes(self) -> int:
        """Payload bytes that the peer has sent us, plus bytes of this stream's answers that it has accepted."""
        ...

    def call_over(self, call_id: int) -> None:
        """Record that nothing more will be sent for this call."""
        ...

    def give_back(self, held_bytes: int) -> None:
        """Release the slot and the memory of a call that has ended."""
        ...

    def reset(self) -> None:
        """End the stream, because the caller does not read its answers."""
        ...


class ServedCall:
    """One call being served, already counted in its method's load. A job of the task pool."""

    __slots__ = (
        "_body",
        "_caller",
        "_id",
        "_mark",
        "_method",
        "_over",
        "_released",
        "_sending",
        "_since",
        "deadline",
        "frames",
        "held_bytes",
        "parts",
        "worker",
    )

    def __init__(self, caller: Caller, call_id: int, method: Method, body: msgspec.Struct, deadline: float) -> None:
        self.deadline = deadline
        self.frames: tuple[TensorFrame, ...] = ()
        self.held_bytes = 0  # reserved in the book: payload of `frames`, and the body
        self.parts: CallStream | None = None  # of a streaming call
        self.worker: PoolWorker | None = None
        self._caller = caller
        self._id = call_id
        self._method = method
        self._body = body
        self._since = trio.current_time()
        self._over = False  # for the caller
        self._sending = False  # frames of the answer
        self._released = False
        self._mark: tuple[float, int] | None = None  # (time of the caller's last progress, `moved_bytes` at that time)
        method.under_way[self] = None

    def objection(self, part: RpcMessage) -> str | None:
        """Reason to refuse this part, or None if it is within the method's limits."""
        return self._method.load.declared.objection(len(part.body), len(part.headers), part.frame_bytes, part.rows)

    @property
    def in_round(self) -> bool:
        """True if the call belongs to the current round; its caller need not keep a minimum rate then."""
        return self._method.load.declared.in_round

    @property
    def user(self) -> User:
        """The user under which the book accounts its caller."""
        return self._caller.user

    def stalled_s(self, now: float) -> float:
        """Seconds that the call has waited while its caller transferred less than the minimum rate.

        Counted from the first check, because only from then on another call waits for its slot.
        """
        declared = self._method.load.declared
        if not (self.worker is None or self._sending or declared.fetches) or declared.in_round:
            self._mark = None  # it waits for this machine or for other peers
            return 0.0
        moved = self._caller.moved_bytes()
        since, before = self._mark or (now, moved)
        if moved > before and moved - before >= RPC_LEAST_BYTES_PER_S * (now - since):
            since, before = now, moved
        self._mark = since, before
        return now - since

    def give_way(self) -> None:
        """End the call, because others wait for its slot and its caller makes no progress."""
        self._method.load.counters.gave_way += 1
        if self._sending:
            self._caller.reset()
        self.cancel(Overloaded("another call needs this slot, and this call's caller makes no progress", RPC_STALL_S))

    @property
    def over(self) -> bool:
        """True if its caller was answered or no longer waits."""
        return self._over

    def about(self) -> str:
        return f"{self._method.name.full} called by {self._caller.peer.short}"

    async def run(self) -> None:
        """Run the handler and send its answer. LocalErrors, which are our own mistakes, go to the supervisor."""
        incoming = Incoming(self._caller.peer, self._body, self.frames, self.deadline)
        try:
            if self._over:  # cancelled before it began
                pass
            elif self._method.unary is not None:
                await self._answer(await self._method.unary(incoming))
            elif self._method.streaming is not None and self.parts is not None:
                await self._method.streaming(incoming, self.parts)
                self.parts.finish()
        except LocalError:
            raise
        except PeerdError as error:
            self._failed(error)
        except BaseExceptionGroup as group:
            self._failed(_only_failure(group))
        self._settle()
        self._release()

    def cut(self, crashed: bool) -> None:
        """End the call after its handler was cancelled or (`crashed`) failed by an internal error."""
        try:
            if self._sending:
                self._caller.reset()
            self._fail(Refused("the handler failed") if crashed else TooSlow("the deadline passed"))
        finally:
            self._release()

    def abandon(self) -> None:
        """Reset the stream, because not even the failure could be sent."""
        self._settle()
        self._caller.reset()

    def cancel(self, error: PeerdError | None = None) -> None:
        """Cancel the handler, because the caller no longer waits, or fail the call with `error`."""
        if error is not None:
            self._fail(error)
        self._settle()
        if self.worker is None:
            self._release()  # it never began
        else:
            self.worker.cancel(self)

    def _failed(self, error: PeerdError) -> None:
        """Send the handler's error to the caller, unless a partial payload was sent, which nothing can follow."""
        if error is self._caller.outbox.failure:
            raise error
        self._fail(error)

    def _fail(self, error: PeerdError) -> None:
        if not self._over:
            self._method.load.counters.failed += 1
            self._caller.note_failure(error)
            if self._caller.outbox.put(encode_failure(self._id, error)) is not None:
                self._caller.reset()  # it does not even read failures
            self._settle()

    async def _answer(self, answer: Answer[Any]) -> None:
        body = encode(answer.body)
        headers, payloads = outgoing(answer.frames) if answer.frames else (b"", [])
        if self._over:
            return
        full = self._caller.outbox.put(encode_message(REPLY, self._id, body, headers, len(payloads)), *payloads)
        if full is not None:
            raise Overloaded(f"too many answers are unread: {full}", self._method.load.retry_after_s())
        self._settle()
        if payloads:
            self._sending = True
            await self._caller.outbox.feed(payloads)
            await self._taken(sum(map(len, payloads)))
            self._sending = False

    async def _taken(self, size: int) -> None:
        """Wait until the answer's frames were passed to the stream. If the caller does not read them, reset the stream.

        The stream of a caller that takes part in the current round is not reset.
        """
        patient = self._caller.share.patient or self.in_round
        while True:
            with trio.move_on_after(RPC_MESSAGE_S + size / RPC_LEAST_BYTES_PER_S) as waiting:
                await self._caller.outbox.flushed()
            if not waiting.cancelled_caught:
                return
            if not patient:
                self._caller.reset()
                return

    def _settle(self) -> None:
        if not self._over:
            self._over = True
            if self.parts is not None:
                self.parts.discard()
            self._caller.call_over(self._id)

    def _release(self) -> None:
        if not self._released:
            self._released = True
            del self._method.under_way[self]
            self._method.load.leave(self._caller.user, trio.current_time() - self._since)
            self._caller.give_back(self.held_bytes)


def _only_failure(group: BaseExceptionGroup[BaseException]) -> PeerdError:
    """The first failure of a handler that used a nursery. Raises the group again if it contains anything else.

    If a handler was cancelled just as it failed, only the cancellation is raised, because no caller waits for the
    failure.
    """
    _, rest = group.split(lambda error: isinstance(error, PeerdError) and not isinstance(error, LocalError))
    if rest is not None:
        raise group if isinstance(group, ExceptionGroup) else rest
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, PeerdError)
    return error
