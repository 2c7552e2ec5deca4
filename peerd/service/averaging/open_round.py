"""A round of averaging that is under way here: what has come, what is owed, and when our own parts may leave.

`service.averaging.allreduce` drives it. Small plain parts are summed on the loop: that takes less than handing them to
a worker's thread. Whatever is coded goes to the worker: each version costs torch's calls, however small it is.
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

from peerd.core.frame import FrameHeader, TensorFrame
from peerd.core.work import Worker
from peerd.machine.averaging.allreduce import AllReduceRound, AveragingPlan, Part, PartPace, RoundFailed
from peerd.service.averaging.pacing import RoundPacing
from peerd.service.averaging.reduce import PartCoder, PlainParts, Vector, VectorMemory, Version, check_form, is_plain
from peerd.service.rpc.rpc import CallStream, Encoded
from peerd.signals import Signal

T = TypeVar("T")

SMALL_VALUES = 1 << 19  # of all versions together: added in 0.09 ms, in 0.25 if they are 512 of 1,024


@dataclass(slots=True)
class OpenRound:
    """A round that is under way here. `scope` ends its tasks; `failure` says why, when it was not success."""

    plan: AveragingPlan
    round: AllReduceRound
    source: Vector | None  # None: a helper, or a listener
    result: Vector  # empty for a helper
    worker: Worker
    coder: PartCoder
    evenly: RoundPacing
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    failure: RoundFailed | None = None
    versions: dict[int, dict[str, Version]] = field(default_factory=dict)
    unsummed: int = field(init=False)  # of our own parts
    answers: dict[int, Encoded] = field(default_factory=dict)  # sums of our own parts, as they travel
    owed: dict[int, int] = field(default_factory=dict)  # how many have not taken such an answer
    returns: list[Returns] = field(default_factory=list)  # one for each member that asks for sums
    over: trio.Event = field(default_factory=trio.Event)  # done or failed
    doubt: tuple[float, str, str] | None = None  # since when, of which peer, why
    came: dict[str, int] = field(default_factory=dict)  # payload bytes from each of the others, at the last look
    calls: list[CallStream] = field(default_factory=list)  # under way with the others
    left_bytes: int = 0  # on these, at the last look
    looked_at: float = field(default_factory=trio.current_time)
    moved_at: float = field(default_factory=trio.current_time)  # when anything came from the others, or left for them

    def __post_init__(self) -> None:
        self.unsummed = sum(part.owner == self.round.own for part in self.round.parts)

    def fail(self, reason: str, lost: tuple[str, ...]) -> None:
        self.failure = self.failure or RoundFailed(reason, lost)
        self.scope.cancel()
        self.over.set()
        self.let_go()

    def doubts(self, reason: str, peer: str) -> None:
        """Note that the round has ended at `peer`, perhaps by a fault of somebody else."""
        self.doubt = self.doubt or (trio.current_time(), peer, reason)

    def look(self, now: float, came_bytes: Callable[[str], int]) -> None:
        """Take note of the others of whom bytes came since the last look, and whether any left: a part may take long
        on a slow line.
        """
        since, self.looked_at = self.looked_at, now  # they came then at the earliest: nobody is heard later than he was
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
        """The scope of a call of this round."""
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
        """Destination of a part's sum. A helper holds no vector, only the sums that somebody still needs."""
        if not self.round.takes:
            return np.empty(part.end - part.begin, self.result.dtype)
        return self.result[part.begin : part.end]

    async def computed(self, job: Callable[[], T], values: int, name: str) -> T:
        """Result of `job`, which computes so many values: at once when they are few, else on the worker."""
        if values <= SMALL_VALUES and isinstance(self.coder, PlainParts):
            return job()
        return await self.worker.run(job, name=name)

    def let_go(self) -> None:
        """Let sums go: there are some that may leave, or that never will."""
        for one in self.returns:
            one.let_go()

    def taken(self, index: int) -> None:
        """One more sender has the sum of this part; with the last one it is let go."""
        self.owed[index] -= 1
        if not self.owed[index]:
            del self.answers[index]


class Returns:
    """The sums that one member asks for; they leave in the order in which it asked, each as soon as it is there.

    Nobody waits in between: the task that makes a sum puts it on every call. What a member does not take waits here.
    """

    def __init__(self, state: OpenRound, parts: CallStream) -> None:
        self._state, self._parts = state, parts
        self._due = deque[int]()
        self._left = Signal()
        self.scope = trio.CancelScope()  # cancelled when something due will never be there

    def __enter__(self) -> Returns:
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
        """Put what is there, as far as the call takes it."""
        state, due = self._state, self._due
        while due and not self._parts.full and (answer := state.answers.get(due[0])) is not None:
            state.taken(due.popleft())
            self._parts.put(answer)
        if not due:
            self._left.notify()
        elif state.failure is not None:
            self.scope.cancel()

    async def left(self) -> None:
        """Wait until all that is due has been put."""
        while self._due:
            await self._left.wait()


class PartGate:
    """Gate for parts, which wait until the pace of the round lets them leave: one of each owner, its next one."""

    def __init__(self, pace: PartPace) -> None:
        self._pace = pace
        self._waiting: dict[str, tuple[Part, trio.Event]] = {}

    async def passed(self, part: Part) -> None:
        """Wait until this part may leave."""
        if not self._pace.may_leave(part):
            opened = trio.Event()
            self._waiting[part.owner] = part, opened
            await opened.wait()

    def returned(self, owner: str) -> None:
        """The sum of the next part of `owner` is here."""
        if self._pace.returned(owner):
            for part, opened in [*self._waiting.values()]:
                if self._pace.may_leave(part):
                    del self._waiting[part.owner]
                    opened.set()


class Places:
    """Destinations for the sums of a share: uncoded ones are received where they belong."""

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
    """Our version of a part that we sum ourselves; None: we bring none.

    Where other groups make the same sum, each with another owner, it must be what the peers to which it is sent get.
    """
    if state.source is None:
        return None
    values = state.source[part.begin : part.end]
    coded = state.plan.copies > 1 and not isinstance(state.coder, PlainParts)
    return await encoded(state, part, values) if coded else values


def version_of(state: OpenRound, part: Part, frame: TensorFrame) -> Version:
    """A member's version of a part, if it has the right form; a coded one is decoded with the others."""
    like = np.empty(part.end - part.begin, state.result.dtype)  # never touched: costs no memory
    if isinstance(state.coder, PlainParts):
        return state.coder.decode(frame, like)
    check_form(frame, like)
    return frame
