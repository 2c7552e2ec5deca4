"""Trail: the totals of the steps from a position to the swarm's, fetched one after another, ahead of their replay.

Fetching can begin at a state that is still downloading: donors keep a total for a few steps, a download may take many.
Invariants: each leap begins where the one before it ends; never more than STATE_TRAIL leaps wait for their replay; a
trail that ends (`broken` has the reason) stays ended. Several donors vouch for each total: see
`service.state.snapshot`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import trio

from peerd.core.errors import Refused, RemoteError
from peerd.core.limits import STATE_TRAIL
from peerd.core.messages.swarm import Position
from peerd.signals import Signal
from peerd.training.catchup.step_totals import StepTotal

_PAUSE_S = 0.3  # before a total is asked for again
_TRIES = 4  # for one total, while no donor says that it is gone
_REFUSALS = 2  # members commit one after another: the first may come too early


class TotalsTrail:
    """See the module's header."""

    def __init__(self, fetch: Callable[[Position], Awaitable[StepTotal]], goal: Callable[[], Position | None]) -> None:
        """`fetch` gets the leap from a position, or raises RemoteError; `goal`: the swarm's position; None: no goal."""
        self._fetch, self._goal = fetch, goal
        self._leaps: deque[StepTotal] = deque()
        self._start: Position | None = None  # of the first leap that was not taken yet
        self._end: Position | None = None
        self._changed = Signal()
        self.broken: str | None = None

    def begin(self, position: Position) -> None:
        """Start the trail at a position; leaps from another one are dropped."""
        if position != self._start:
            self._leaps.clear()
            self._start = self._end = position
            self.look()

    def look(self) -> None:
        """Read the goal again: it has moved."""
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
                self._break(f"the swarm has gone to step {goal.step} by another way")
                return
            try:
                leap = await self._fetch(end)
            except RemoteError as error:
                failures, refusals = failures + 1, refusals + isinstance(error, Refused)
                if failures >= _TRIES or refusals >= _REFUSALS:
                    self._break(f"the total after step {end.step} cannot be had: {error}")
                    return
                await trio.sleep(_PAUSE_S)
                continue
            failures = refusals = 0
            if end == self._end:  # else it began anew meanwhile
                self._leaps.append(leap)
                self._end = leap.target
                self.look()

    def _break(self, why: str) -> None:
        self.broken = why
        self.look()

    async def next(self) -> StepTotal | None:
        """The next leap; None when there is none to come: the end of the trail is the goal, or it is broken."""
        while not self._leaps:
            if self.broken is not None or self._goal() in (None, self._end):
                return None
            await self._changed.wait()
        self._start = self._leaps[0].target
        self.look()
        return self._leaps.popleft()
