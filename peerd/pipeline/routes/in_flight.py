"""The number of microbatches that a trainer keeps in flight, sans-IO: enough to fill all stages, found by trying.

The number N doubles as long as twice as many bring a higher rate in a round (the time in which everything in flight
passes once). To fill the stages, N must be at least the time of a whole pass over the slowest stage's period, and more
if peers compute backwards first: forwards then wait for a wave of backwards, and such waves leave devices idle. Inputs
are stored until the end of the step anyway, so a larger N needs no more memory. But of several trainers the one with
the larger N gets a larger share. So once the stages are full, N grows by a few per round until a pass takes some times
as long as the shortest one, and shrinks by a factor if passes take even longer (like TCP's windows): the trainers
converge to equal shares.

Times are the caller's; one object serves one trainer. All figures are its own measurements, and no peer's claims.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

_GROWN: Final = 1.05  # ratio to the highest earlier rate that counts as a gain
_SAME: Final = 2  # rounds without a gain after which the stages count as full
_SHORT, _LONG, _TOO_LONG = 2.0, 5.0, 7.0  # pass time over the shortest: N doubles below, stops at, shrinks above
_SOME: Final = 1.5  # growth factor between _SHORT and _LONG
_LEAST_SHARE: Final = 0.5  # smallest factor of one reduction
_ADDED: Final = 2  # growth per round after the doubling has ended
_LEAST_S: Final = 1e-6  # least duration of a pass, in case the clock has not moved
_RATES_OF, _SHORTEST_OF = 12, 40  # rounds that are kept

FINDING_OUT: Final = "testing how many fill all stages"
LIMITED: Final = "limited by limits.microbatches_in_flight"


class InFlight:
    """The number of microbatches in flight of one trainer. `most`: upper bound."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._wanted = 0.0
        self._doubles, self._same = True, 0
        self._began = float("-inf")  # start of the round
        self._ways: list[float] = []  # durations of the round's passes, in seconds
        self._rates: deque[float] = deque(maxlen=_RATES_OF)
        self._shortest: deque[float] = deque(maxlen=_SHORTEST_OF)
        self.why = FINDING_OUT

    def wanted(self, at_least: int) -> int:
        """Number of microbatches to keep in flight; `at_least` until the stages are full."""
        if self._doubles:
            self._wanted = max(self._wanted, at_least)
        return min(self._most, max(1, round(self._wanted)))

    def returned(self, now: float, took_s: float, under_way: int) -> None:
        """Record that a microbatch returned after `took_s`. `under_way`: the number in flight, including this one."""
        self._ways.append(max(took_s, _LEAST_S))
        if now - took_s < self._began or now <= self._began:
            return  # it was sent before the round began
        if self._began > float("-inf"):
            self._end_round(len(self._ways) / (now - self._began), under_way)
        self._began, self._ways = now, []

    def _end_round(self, rate: float, under_way: int) -> None:
        self._shortest.append(min(self._ways))
        if under_way < 0.9 * min(self._most, self._wanted) - 1:
            self.why = "the batch is full"
            return  # with fewer than wanted in flight the rate is no measurement
        highest = max(self._rates, default=0.0)
        self._rates.append(rate)
        slowness = statistics.median(self._ways) / min(self._shortest)
        if self._doubles:
            self._double(rate > _GROWN * highest, slowness)
        else:
            self._keep(slowness)
        self._wanted = min(self._most, max(1.0, self._wanted))
        full = "all stages are full" if not self._doubles else FINDING_OUT
        self.why = "as many as a batch has" if self._wanted >= self._most else full

    def _double(self, has_grown: bool, slowness: float) -> None:
        self._same = 0 if has_grown else self._same + 1
        self._doubles = self._same < _SAME and slowness < _LONG
        if self._doubles and has_grown:
            self._wanted *= 2.0 if slowness < _SHORT else _SOME

    def _keep(self, slowness: float) -> None:
        """Add a few or reduce by a factor, so that several trainers converge to equal numbers."""
        if slowness < _LONG:
            self._wanted += _ADDED
        elif slowness > _TOO_LONG:
            self._wanted *= max(_LEAST_SHARE, _LONG / slowness)
