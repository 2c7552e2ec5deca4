"""State of an averaging round in progress: versions received, sums still to return, and pacing of our own parts.

`AllReduceService` drives it. Small plain parts are summed on the event loop, which is quicker than handing them to a
worker thread. Coded parts always go to the worker, because torch's calls take long for small parts, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import trio

from peerd.averaging.allreduce_round import AllReduceRound, AveragingPlan, Part, PartPace, RoundFailed
from peerd.averaging.pacing import RoundPacing
from peerd.averaging.reduce import PartCoder, PlainParts, Vector, VectorMemory, Version, check_form, is_plain
from peerd.codec.format.frame import FrameHeader, TensorFrame
from peerd.core.signals import Signal
from peerd.core.work import Worker
from peerd.rpc.rpc import CallStream, Encoded

T = TypeVar("T")

SMALL_VALUES = 1 << 19  # values of all versions: added in 0.09 ms, or in 0.25 ms for 512 versions of 1,024


@dataclass(slots=True)
class OpenRound:
    """A round in progress. `scope` ends its tasks; `failure` is the reason if it failed."""

    plan: AveragingPlan
    round: AllReduceRound
    source: Vector | None  # None for a helper or a listener
    result: Vector  # empty for a helper
    worker: Worker
    coder: PartCoder
    evenly: RoundPacing
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    failure: RoundFailed | None = None
    versions: dict[int, dict[str, Version]] = field(default_factory=dict)
    unsummed: int = field(init=False)  # number of our own parts without a sum
    answers: dict[int, Encoded] = field(default_factory=dict)  # encoded sums of our own parts
    owed: dict[int, int] = field(default_factory=dict)  # number of members that have not received this answer yet
    returns: list[SumReplies] = field(default_factory=list)  # one for each member that requests sums
    over: trio.Event = field(default_factory=trio.Event)  # done or failed
    doubt: tuple[float, str, str] | None = None  # since when, which peer, why
    came: dict[str, int] = field(default_factory=dict)  # payload bytes from each other peer, at the last check
    calls: list[CallStream] = field(default_factory=list)  # in progress with other peers
    left_bytes: int = 0  # bytes sent on these calls, at the last check
    looked_at: float = field(default_factory=trio.current_time)
    moved_at: float = field(default_factory=trio.current_time)  # when we last received or sent any bytes

    def __post_init__(self) -> None:
        self.unsummed = sum(part.owner == self.round.own for part in self.round.parts)

    def fail(self, reason: str, lost: tuple[str, ...]) -> None:
        self.failure = self.failure or RoundFailed(reason, lost)
        self.scope.cancel()
        self.over.set()
        self.let_go()

    def doubts(self, reason: str, peer: str) -> None:
        """Record that the round has ended at `peer`. Another peer may be at fault."""
        self.doubt = self.doubt or (trio.current_time(), peer, reason)

    def look(self, now: float, came_bytes: Callable[[str], int]) -> None:
        """Update who has sent bytes since the last check, and whether ours were sent: a part may take long on a slow
        internet connection.
        """
        since, self.looked_at = self.looked_at, now  # the earliest time at which these bytes can have come
        before, self.left_bytes = self.left_bytes, sum(call.left_bytes for call in self.calls)
        if self.left_bytes != before:
            self.moved_at = now
        for peer in [*self.round.others]:
            known, self.came[peer] = self.came.get(peer), came_bytes(peer)
            if known is not None and self.came[peer] != known:
                self.round.heard(since, peer)
                self.moved_at = now

    @contextmanager
    def on_call(self, call: CallStream) -> Iterator[None]:
        """Count the bytes of a call of this round while it is open."""
        self.calls.append(call)
        try:
            yield
        finally:
            self.calls.remove(call)

    @property
    def done(self) -> bool:
        return self.round.finished and not self.unsummed

    def get_on(self) -> None:
        if self.done:
            self.over.set()

    def target(self, part: Part) -> Vector:
        """Destination of a part's sum. A helper stores no vector, only the sums that another peer still needs."""
        if not self.round.takes:
            return np.empty(part.end - part.begin, self.result.dtype)
        return self.result[part.begin : part.end]

    async def computed(self, job: Callable[[], T], values: int, name: str) -> T:
        """Result of `job`, which adds up `values` values: runs here if they are few and plain, else on the worker."""
        if values <= SMALL_VALUES and isinstance(self.coder, PlainParts):
            return job()
        return await self.worker.run(job, name=name)

    def let_go(self) -> None:
        """Send the sums that are ready. After a failure, end the calls that still wait for one."""
        for one in self.returns:
            one.let_go()

    def taken(self, index: int) -> None:
        """Record that one more member was sent the sum of this part. After the last one, the sum is freed."""
        self.owed[index] -= 1
        if not self.owed[index]:
            del self.answers[index]


class SumReplies:
    """The sums that one member has requested. They are sent in the order of its requests, each as soon as it is ready.

    No task waits in between: the task that computes a sum queues it on every call. If the queue of a call is
    full, its sums wait here.
    """

    def __init__(self, state: OpenRound, parts: CallStream) -> None:
        self._state, self._parts = state, parts
        self._due = deque[int]()
        self._left = Signal()
        self.scope = trio.CancelScope()  # cancelled if a requested sum will never be made

    def __enter__(self) -> SumReplies:
        self._state.returns.append(self)
        self._parts.on_room(self.let_go)
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.on_room(None)
        self._state.returns.remove(self)

    def owe(self, part: Part) -> None:
        self._due.append(part.index)
        self.let_go()

    def let_go(self) -> None:
        """Queue the sums that are ready, until the call is full."""
        state, due = self._state, self._due
        while due and not self._parts.full and (answer := state.answers.get(due[0])) is not None:
            state.taken(due.popleft())
            self._parts.put(answer)
        if not due:
            self._left.notify()
        elif state.failure is not None:
            self.scope.cancel()

    async def left(self) -> None:
        """Wait until all requested sums have been queued."""
        while self._due:
            await self._left.wait()


class PartGate:
    """Delays parts until the round's pace allows sending them. At most one part of each owner waits: its next one."""

    def __init__(self, pace: PartPace) -> None:
        self._pace = pace
        self._waiting: dict[str, tuple[Part, trio.Event]] = {}

    async def passed(self, part: Part) -> None:
        """Wait until this part may be sent."""
        if not self._pace.may_leave(part):
            opened = trio.Event()
            self._waiting[part.owner] = part, opened
            await opened.wait()

    def returned(self, owner: str) -> None:
        """Record that the sum of the next part of `owner` has arrived, and release the parts that may now be sent."""
        if self._pace.returned(owner):
            for part, opened in [*self._waiting.values()]:
                if self._pace.may_leave(part):
                    del self._waiting[part.owner]
                    opened.set()


class SumBuffers:
    """Destinations for the sums of a share: a plain sum is received straight into the result."""

    def __init__(self, state: OpenRound, share: list[Part], memory: VectorMemory) -> None:
        self._state, self._left, self._memory = state, deque(share), memory

    def __call__(self, headers: tuple[FrameHeader, ...]) -> list[memoryview] | None:
        if not self._left or len(headers) != 1:
            return None
        target = self._state.target(self._left.popleft())
        return [target.data.cast("B")] if is_plain(headers[0], target) else self._memory.rooms(headers)


async def encoded(state: OpenRound, part: Part, values: Vector) -> TensorFrame:
    if isinstance(state.coder, PlainParts):  # nothing to compute
        return state.coder.encode(part.begin, values)
    return await state.worker.run(partial(state.coder.encode, part.begin, values), name="code a part")


async def as_others_see_it(state: OpenRound, part: Part) -> Version | None:
    """Our version of a part that we sum ourselves, or None if we contribute no vector.

    Several groups may make the same sum, each with another owner. Then our own version must be the encoded one that the
    other owners receive.
    """
    if state.source is None:
        return None
    values = state.source[part.begin : part.end]
    coded = state.plan.copies > 1 and not isinstance(state.coder, PlainParts)
    return await encoded(state, part, values) if coded else values


def version_of(state: OpenRound, part: Part, frame: TensorFrame) -> Version:
    """A member's version of a part, after a check of its form. A coded one stays encoded until the sum is due."""
    like = np.empty(part.end - part.begin, state.result.dtype)  # never written, so it costs no memory
    if isinstance(state.coder, PlainParts):
        return state.coder.decode(frame, like)
    check_form(frame, like)
    return frame
