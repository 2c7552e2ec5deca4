"""Trail: the totals of the steps from a position to the swarm's, fetched in order before the steps are replayed.

Fetching can begin while the state at the start is still downloading, because donors keep a total for only a few steps
and a download may take longer. Invariants: each leap (one step with its total) begins where the previous one ends; at
most STATE_TRAIL leaps wait for their replay; a trail that has ended stays ended (`broken` has the reason). Each total
is confirmed by several donors, see `state.snapshot`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import trio

from peerd.core.errors import NoMemory, Refused, RemoteError
from peerd.core.limits import STATE_TRAIL
from peerd.core.signals import Signal
from peerd.messages.swarm import Position
from peerd.state.catchup.step_totals import StepTotal

_PAUSE_S = 0.3  # before a total is requested again
_TRIES = 4  # for one total, if no donor refuses
_REFUSALS = 2  # donors commit one after another, so the first request may be too early


class TotalsTrail:
    """The fetched leaps (one step with its total each) that are to be replayed."""

    def __init__(self, fetch: Callable[[Position], Awaitable[StepTotal]], goal: Callable[[], Position | None]) -> None:
        """`fetch` downloads the leap from a position, or raises RemoteError or NoMemory. `goal` returns the swarm's
        position or None.
        """
        self._fetch, self._goal = fetch, goal
        self._leaps: deque[StepTotal] = deque()
        self._start: Position | None = None  # where the first leap not yet replayed begins
        self._end: Position | None = None
        self._changed = Signal()
        self.broken: str | None = None

    def begin(self, position: Position) -> None:
        """Start the trail at a position. Leaps from any other start are dropped."""
        if position != self._start:
            self._leaps.clear()
            self._start = self._end = position
            self.look()

    def look(self) -> None:
        """Notify the trail that the goal has changed."""
        self._changed.notify()

    async def lay(self) -> None:
        """Fetch leaps until the trail breaks."""
        failures = refusals = 0
        while self.broken is None:
            end, goal = self._end, self._goal()
            if end is None or goal is None or end == goal or len(self._leaps) >= STATE_TRAIL:
                await self._changed.wait()
                continue
            if goal.step <= end.step:
                self._break(f"the swarm is now at step {goal.step} on another branch")
                return
            try:
                leap = await self._fetch(end)
            except (RemoteError, NoMemory) as error:
                failures, refusals = failures + 1, refusals + isinstance(error, Refused)
                if failures >= _TRIES or refusals >= _REFUSALS:
                    self._break(f"the total after step {end.step} could not be fetched: {error}")
                    return
                await trio.sleep(_PAUSE_S)
                continue
            failures = refusals = 0
            if end == self._end:  # else the trail was restarted meanwhile
                self._leaps.append(leap)
                self._end = leap.target
                self.look()

    def _break(self, why: str) -> None:
        self.broken = why
        self.look()

    async def next(self) -> StepTotal | None:
        """Wait for the next leap. Returns None if the trail has reached the goal or is broken."""
        while not self._leaps:
            if self.broken is not None or self._goal() in (None, self._end):
                return None
            await self._changed.wait()
        self._start = self._leaps[0].target
        self.look()
        return self._leaps.popleft()
