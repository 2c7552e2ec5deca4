"""One call that is being served: runs the handler, answers once, and gives back what the call held.

A call ends in exactly one way: answered, failed (its error travels), or cancelled (nothing travels). Whatever the
way, its place in the method's load and its bytes in the budget are given back once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import trio

from peerd.core.errors import LocalError, PeerdError, Refused, TooSlow
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.messages import encode
from peerd.machine.rpc import REPLY, Message, encode_failure, encode_frames, encode_message
from peerd.machine.rpc_calls import MethodLoad, MethodName
from peerd.service.rpc_crew import Worker
from peerd.service.rpc_io import Outbox
from peerd.service.rpc_parts import CallStream
from peerd.service.rpc_types import Answer, Incoming

UnaryHandler = Callable[[Incoming[Any]], Awaitable[Answer[Any]]]
StreamHandler = Callable[[Incoming[Any], CallStream], Awaitable[None]]


@dataclass(slots=True)
class Method:
    """A method that is served: how it is called, what it may cost, how loaded it is. One of the handlers is set."""

    name: MethodName
    request: type[msgspec.Struct]
    load: MethodLoad
    unary: UnaryHandler | None = None
    streaming: StreamHandler | None = None


class Caller(Protocol):
    """The stream that a call came on."""

    peer: PeerId
    outbox: Outbox

    def call_ended(self, call_id: int, held_bytes: int) -> None: ...


class ServedCall:
    """A job of the crew: one call, already counted in its method's load."""

    __slots__ = (
        "_body",
        "_caller",
        "_id",
        "_method",
        "_over",
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
        self.held_bytes = 0  # payload of `frames`, in the budget
        self.parts: CallStream | None = None  # of a streaming call
        self.worker: Worker | None = None
        self._caller = caller
        self._id = call_id
        self._method = method
        self._body = body
        self._since = trio.current_time()
        self._over = False

    def objection(self, part: Message) -> str | None:
        """Why this part is not taken; None when it is within the method's limits."""
        return self._method.load.limits.objection(len(part.body), len(part.headers), part.payload_bytes)

    def about(self) -> str:
        return f"{self._method.name.full} called by {self._caller.peer.short}"

    async def run(self) -> None:
        """Run the handler and send what it says. What is our own mistake goes on to the supervisor."""
        incoming = Incoming(self._caller.peer, self._body, self.frames, self.deadline)
        try:
            if self._method.unary is not None:
                self._answer(await self._method.unary(incoming))
            elif self._method.streaming is not None and self.parts is not None:
                await self._method.streaming(incoming, self.parts)
                self.parts.finish()
        except LocalError:
            raise
        except PeerdError as error:
            self.fail(error)
        except ExceptionGroup as group:
            self.fail(_only_failure(group))
        self._end()

    def cut(self, crashed: bool) -> None:
        """The handler was ended from outside, or crashed."""
        self.fail(Refused("the handler failed") if crashed else TooSlow("the deadline passed"))

    def cancel(self) -> None:
        """The caller no longer waits."""
        if not self._over:
            self._end()
            if self.worker is not None:
                self.worker.cancel(self)

    def fail(self, error: PeerdError) -> None:
        """End the call with an error that travels."""
        if not self._over:
            self._method.load.counters.failed += 1
            self._caller.outbox.put(encode_failure(self._id, error))
            self._end()

    def _answer(self, answer: Answer[Any]) -> None:
        if self._over:
            return
        body = encode(answer.body)
        if answer.frames:
            headers, payloads = encode_frames(answer.frames)
            self._caller.outbox.put(encode_message(REPLY, self._id, body, headers, len(payloads)), *payloads)
        else:
            self._caller.outbox.put(encode_message(REPLY, self._id, body))

    def _end(self) -> None:
        if not self._over:
            self._over = True
            self._method.load.leave(self._caller.peer, trio.current_time() - self._since)
            if self.parts is not None:
                self.parts.discard()
            self._caller.call_ended(self._id, self.held_bytes)


def _only_failure(group: ExceptionGroup[Exception]) -> PeerdError:
    """The first failure of a handler that used a nursery; raises the group again when it holds anything else."""
    _, rest = group.split(lambda error: isinstance(error, PeerdError) and not isinstance(error, LocalError))
    if rest is not None:
        raise group
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, PeerdError)
    return error
