"""One call that is being served: runs the handler, answers once, and gives back what the call held.

For its caller, a call ends in exactly one way: answered, failed (its error travels), or cancelled (nothing travels).
Its places in the method's load and in the book, and the bytes that it holds, are given back once, when the handler has
really ended and the answer's frames are on their way: so neither cancelling nor not reading lets a caller have more
than its share. An answer that finds no room, as its caller has too much unread, is not kept: it becomes Overloaded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import trio

from peerd.core.errors import LocalError, Overloaded, PeerdError, Refused, TooSlow
from peerd.core.frame import FrameHeader, TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import RPC_LEAST_BYTES_PER_S, RPC_MESSAGE_S, RPC_STALL_S
from peerd.core.messages.encoding import encode
from peerd.machine.budget.book import User
from peerd.machine.rpc.message_codec import REPLY, RpcMessage, encode_failure, encode_message
from peerd.machine.rpc.method_load import MethodLoad, MethodName
from peerd.service.rpc.call_stream import CallStream
from peerd.service.rpc.outbox import Outbox, outgoing
from peerd.service.rpc.room import Share
from peerd.service.rpc.task_pool import PoolWorker
from peerd.service.rpc.types import Answer, Incoming

UnaryHandler = Callable[[Incoming[Any]], Awaitable[Answer[Any]]]
Objection = Callable[[PeerId, Any], PeerdError | None]
FramesObjection = Callable[[PeerId, tuple[FrameHeader, ...]], PeerdError | None]
StreamHandler = Callable[[Incoming[Any], CallStream], Awaitable[None]]


@dataclass(slots=True)
class Method:
    """A method that is served: how it is called, what it declares, how loaded it is. One of the handlers is set.

    `objection` tells, by the request's body alone, why a call is refused before its frames are received, and
    `frames_objection` by their headers.
    """

    name: MethodName
    request: type[msgspec.Struct]
    load: MethodLoad
    unary: UnaryHandler | None = None
    streaming: StreamHandler | None = None
    objection: Objection | None = None
    frames_objection: FramesObjection | None = None
    under_way: dict[ServedCall, None] = field(default_factory=dict)  # the oldest first


class Caller(Protocol):
    """The stream that a call came on."""

    peer: PeerId
    user: User
    outbox: Outbox
    share: Share

    def note_failure(self, error: PeerdError) -> None:
        """A call has failed: one whose proof does not hold counts against the caller."""
        ...

    def moved_bytes(self) -> int:
        """Bytes that the peer has sent us as payloads, or taken of this stream's answers."""
        ...

    def call_over(self, call_id: int) -> None:
        """Nothing more will be sent for this call."""
        ...

    def give_back(self, held_bytes: int) -> None:
        """A call has ended, and lets go of so many bytes."""
        ...

    def reset(self) -> None:
        """The caller does not take its answers: the stream ends."""
        ...


class ServedCall:
    """A job of the crew: one call, already counted in its method's load."""

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
        self.held_bytes = 0  # of the book: payload of `frames`, and the body
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
        self._mark: tuple[float, int] | None = None  # when its caller was last seen to move, and `moved_bytes` then
        method.under_way[self] = None

    def objection(self, part: RpcMessage) -> str | None:
        """The reason why this part is not taken; None when it is within the method's limits."""
        return self._method.load.declared.objection(len(part.body), len(part.headers), part.frame_bytes, part.rows)

    @property
    def in_round(self) -> bool:
        """True when it belongs to the round under way."""
        return self._method.load.declared.in_round

    @property
    def user(self) -> User:
        """The user that the book knows its caller as."""
        return self._caller.user

    def stalled_s(self, now: float) -> float:
        """Seconds for which the call has waited for its caller, which has moved less than the least rate meanwhile.

        Counted from the first time that this was asked: only then does somebody wait for the call's place.
        """
        declared = self._method.load.declared
        if not (self.worker is None or self._sending or declared.fetches) or declared.in_round:
            self._mark = None  # it waits for this machine, or for others
            return 0.0
        moved = self._caller.moved_bytes()
        since, before = self._mark or (now, moved)
        if moved > before and moved - before >= RPC_LEAST_BYTES_PER_S * (now - since):
            since, before = now, moved
        self._mark = since, before
        return now - since

    def give_way(self) -> None:
        """End the call: others wait for its place, and its caller does not move."""
        self._method.load.counters.gave_way += 1
        if self._sending:
            self._caller.reset()
        self.cancel(Overloaded("another call needs the place, and this one's caller does not move", RPC_STALL_S))

    @property
    def over(self) -> bool:
        """True when its caller was answered, or waits no more."""
        return self._over

    def about(self) -> str:
        return f"{self._method.name.full} called by {self._caller.peer.short}"

    async def run(self) -> None:
        """Run the handler and send what it says. What is our own mistake goes on to the supervisor."""
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
        """The handler was ended from outside, or crashed."""
        try:
            if self._sending:
                self._caller.reset()
            self._fail(Refused("the handler failed") if crashed else TooSlow("the deadline passed"))
        finally:
            self._release()

    def abandon(self) -> None:
        """Give up: not even that could be said."""
        self._settle()
        self._caller.reset()

    def cancel(self, error: PeerdError | None = None) -> None:
        """End the handler: the caller no longer waits, or is told `error`."""
        if error is not None:
            self._fail(error)
        self._settle()
        if self.worker is None:
            self._release()  # it never began
        else:
            self.worker.cancel(self)

    def _failed(self, error: PeerdError) -> None:
        """The handler raised: tell the caller, unless half a payload was sent, which nothing can follow."""
        if error is self._caller.outbox.failure:
            raise error
        self._fail(error)

    def _fail(self, error: PeerdError) -> None:
        if not self._over:
            self._method.load.counters.failed += 1
            self._caller.note_failure(error)
            if self._caller.outbox.put(encode_failure(self._id, error)) is not None:
                self._caller.reset()  # it does not even read what failed
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
        """Wait until the answer's frames are on their way; a caller that does not read them loses its stream, unless it
        takes part in the round under way.
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
    """The first failure of a handler that used a nursery; raises the group again when it holds anything else.

    Of a handler that was cancelled just as it failed, only the cancelling is raised: nobody waits for the failure.
    """
    _, rest = group.split(lambda error: isinstance(error, PeerdError) and not isinstance(error, LocalError))
    if rest is not None:
        raise group if isinstance(group, ExceptionGroup) else rest
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, PeerdError)
    return error
