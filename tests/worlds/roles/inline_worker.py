"""A worker under the virtual clock, with the guarantees of the device's.

A thread would let virtual time run ahead, because trio regards a task that waits for a thread as idle. So it computes
at once, then sleeps for the virtual cost of the job.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import outcome
import trio

from peerd.model.stage.microbatch_books import StageOutcome
from peerd.model.worker import _ORDINARY, _URGENT, _within_memory

T = TypeVar("T")


class _Turn:
    """A lock that admits urgent tasks first, otherwise in order of arrival, and nobody before `free_at`."""

    def __init__(self) -> None:
        self.free_at = float("-inf")
        self._taken = False
        self._line: list[tuple[int, int, trio.Event]] = []
        self._numbers = itertools.count()

    @contextlib.asynccontextmanager
    async def taken(self, urgency: int) -> AsyncIterator[None]:
        mine, holds = (urgency, next(self._numbers)), False
        try:
            while not holds:
                if self._taken:
                    await self._stand_in_line(mine)
                self._taken = holds = True
                await trio.sleep_until(max(self.free_at, trio.current_time()))
                if self._line and self._line[0][:2] < mine:  # a more urgent task has arrived
                    holds = False
                    self._pass_on()
            yield
        finally:
            if holds:
                self._pass_on()

    async def _stand_in_line(self, mine: tuple[int, int]) -> None:
        place = (*mine, trio.Event())
        heapq.heappush(self._line, place)
        try:
            await place[2].wait()
        except trio.Cancelled:
            if place[2].is_set():  # the turn was passed to this task after it was cancelled
                self._pass_on()
            else:
                self._line.remove(place)
                heapq.heapify(self._line)
            raise

    def _pass_on(self) -> None:
        if self._line:
            heapq.heappop(self._line)[2].set()
        else:
            self._taken = False


class InlineWorker:
    """A `peerd.core.work.Worker` for the virtual clock: computes on the loop, then sleeps for `cost_s * slowness`.

    The next job starts when the cost of the previous one has passed, as on a real device. Results that carry their
    seconds carry virtual ones.
    """

    def __init__(self, *, slowness: float = 1.0) -> None:
        self.slowness = slowness
        self.busy_s = 0.0
        self.jobs_done = 0
        self._turn = _Turn()

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        async with self._turn.taken(_URGENT if urgent else _ORDINARY):
            result = outcome.capture(_within_memory, job, name)
            cost_s *= self.slowness
            if isinstance(result, outcome.Value) and isinstance(result.value, StageOutcome):
                result.value.seconds = cost_s
            self._turn.free_at = finished_at = trio.current_time() + cost_s
            self.busy_s += cost_s
            self.jobs_done += 1
        if cost_s > 0:
            await trio.sleep_until(finished_at)
        return result.unwrap()
