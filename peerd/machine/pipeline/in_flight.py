"""The number of microbatches that a trainer keeps under way, sans-IO: as many as fill all stages, found by trying.

While a round of twice as many brings a higher rate, N doubles (a round: one whole way of all that is under way). What
fills the stages is the seconds of a whole way over the slowest stage's period at least, and more where peers do
backwards first: forwards then wait until a wave of backwards has passed, and waves leave devices idle between them.
Inputs are kept to the end of the step anyway, so more under way takes no more memory. Yet of several trainers each gets
a larger share by more: so N rises, by few at a time once the stages are full, to where ways take some times as long as
the shortest one, and falls by a share where they take longer still (as TCP's windows do): all come to equal shares.

Time is the caller's; one object serves one trainer. The figures are its own: no peer's claim goes in.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Final

_GROWN: Final = 1.05  # times the highest rate before: the round has brought more
_SAME: Final = 2  # rounds that brought no more: the stages are full
_SHORT, _LONG, _TOO_LONG = 2.0, 5.0, 7.0  # times the shortest way: twice as many, no more, fewer
_SOME: Final = 1.5  # times as many, in between
_LEAST_SHARE: Final = 0.5  # of them stays, at once
_ADDED: Final = 2  # in a round, once they do not double any more
_LEAST_S: Final = 1e-6  # of a way: a clock may not have moved
_RATES_OF, _SHORTEST_OF = 12, 40  # rounds that are remembered

FINDING_OUT: Final = "finding out how many fill all stages"
LIMITED: Final = "as many as limits.microbatches_in_flight says"


class InFlight:
    """See the module's header. `most`: never more than that."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._wanted = 0.0
        self._doubles, self._same = True, 0
        self._began = float("-inf")  # of the round
        self._ways: list[float] = []  # seconds, of the round
        self._rates: deque[float] = deque(maxlen=_RATES_OF)
        self._shortest: deque[float] = deque(maxlen=_SHORTEST_OF)
        self.why = FINDING_OUT

    def wanted(self, at_least: int) -> int:
        """Microbatches to keep under way; `at_least` until the stages are full."""
        if self._doubles:
            self._wanted = max(self._wanted, at_least)
        return min(self._most, max(1, round(self._wanted)))

    def returned(self, now: float, took_s: float, under_way: int) -> None:
        """A microbatch has come back after `took_s`. `under_way`: how many there were, it among them."""
        self._ways.append(max(took_s, _LEAST_S))
        if now - took_s < self._began or now <= self._began:
            return  # it left before the round began
        if self._began > float("-inf"):
            self._end_round(len(self._ways) / (now - self._began), under_way)
        self._began, self._ways = now, []

    def _end_round(self, rate: float, under_way: int) -> None:
        self._shortest.append(min(self._ways))
        if under_way < 0.9 * min(self._most, self._wanted) - 1:
            self.why = "the batch has no more room"
            return  # of less than was wanted it says nothing
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
        """Add some, or take a share away: so those of several trainers come to be equal."""
        if slowness < _LONG:
            self._wanted += _ADDED
        elif slowness > _TOO_LONG:
            self._wanted *= max(_LEAST_SHARE, _LONG / slowness)
