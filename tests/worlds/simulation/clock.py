"""Time and randomness of the simulator: a node's Clock, scheduled callbacks, and reproducible runs.

Time is trio's; under `run_virtual` it jumps to the next deadline whenever every task waits. Nothing here reads the
machine's clock or its randomness, so a seed decides everything. `deterministic_scheduling` is the only code that uses
trio's private switch; a test fails if trio renames it. Random bytes are predictable here: never use `SimClock` for a
real identity.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, TypeVar

import trio
import trio.testing

from peerd.core.errors import LocalError
from peerd.wire.timer import Timer

T = TypeVar("T")

EPOCH_S: Final = 1_800_000_000.0  # Unix time at virtual time 0: fixed, so that records are equal in every run


class SimClock:
    """The `peerd.core.clock.Clock` of one node. `skew_s`: error of the machine's wall clock, in seconds."""

    def __init__(self, seed: int | str, name: str, *, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s
        self.offset_s = 0.0  # correction of the wall clock, agreed with peers, as in RealClock
        self._root = f"{seed}/{name}"
        self._secure = random.Random(f"{self._root}/secure")

    def now(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return EPOCH_S + trio.current_time() + self.skew_s + self.offset_s

    def secure_bytes(self, count: int) -> bytes:
        return self._secure.randbytes(count)

    def rng(self, purpose: str) -> random.Random:
        return random.Random(f"{self._root}/rng/{purpose}")


class SimAgenda:
    """Calls functions at given times of trio's clock, in order of time, then of registration.

    A function that is due now is called at once, unless an earlier one is due as well. One task, started with `run`,
    calls the others; `at` raises LocalError while it is not running, since the call would wait forever.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._asked = 0
        self._timer = Timer(lambda: self._heap[0][0] if self._heap else math.inf, self._serve)
        self._running = False

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action()` at time `when` of trio's clock."""
        now = trio.current_time()
        if when <= now and not (self._heap and self._heap[0][0] <= now):
            action()
            return
        if not self._running:
            raise LocalError("the simulated network does not run: start SimNet.run in a nursery first")
        self._asked += 1
        heapq.heappush(self._heap, (when, self._asked, action))
        self._timer.rearm()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Call the functions when they are due, until cancelled."""
        self._running = True
        task_status.started()
        try:
            await self._timer.run()
        finally:
            self._running = False
            self._heap.clear()

    def _serve(self) -> None:
        now = trio.current_time()
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()


@contextlib.contextmanager
def deterministic_scheduling(seed: int | str) -> Iterator[None]:
    """Context in which trio schedules the tasks of each round in an order that depends only on `seed`.

    Uses a private switch of trio, which exists for hypothesis. Raises LocalError if this version of trio lacks it.
    """
    from trio._core import _run

    switch, source = "_ALLOW_DETERMINISTIC_SCHEDULING", getattr(_run, "_r", None)
    if not hasattr(_run, switch) or not isinstance(source, random.Random):
        raise LocalError("this version of trio has no switch for deterministic scheduling; runs would not repeat")
    before, state = getattr(_run, switch), source.getstate()
    setattr(_run, switch, True)
    source.seed(f"{seed}/schedule")
    try:
        yield
    finally:
        setattr(_run, switch, before)
        source.setstate(state)


def run_virtual(main: Callable[..., Awaitable[T]], *args: Any, seed: int | str) -> T:
    """trio.run with a virtual clock that starts at 0, and deterministic scheduling.

    `main` must not use threads: trio counts a task that waits for a thread as idle, so virtual time would advance.
    """
    with deterministic_scheduling(seed):
        return trio.run(functools.partial(main, *args), clock=trio.testing.MockClock(autojump_threshold=0))
