"""Algorithm 2 of SWARM (appendix D): queue lengths decide, and one peer moves in each period.

Every `period_s` the queues of each stage are summed. If the stages with the smallest and the largest sum differ, the
peer with the smallest queue of the former moves to the latter. Comparisons are strict, so the first of equals counts:
stages by number, peers by name. This is the paper's rule with one addition: the last peer of a stage stays. A newcomer
joins the stage with the largest sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peerd.swarm.rebalance.loads import PeerLoad, Transfer


@dataclass(frozen=True, slots=True)
class QueuedLoad(PeerLoad):
    """Load of a stage peer with its queue."""

    queue: float = 0.0  # mean number of microbatches that wait for it


class QueueRule:
    """SWARM's rule for one run."""

    def __init__(self, stages: int, period_s: float) -> None:
        self._stages, self._period_s = stages, period_s
        self._due = period_s

    def due(self, now: float) -> float:
        """Time at which `look` is due next."""
        return self._due

    def look(self, now: float, loads: Sequence[QueuedLoad]) -> list[Transfer]:
        """The move of this period, if it is over and there is one. `loads` lack peers that did not report in time."""
        if now < self._due:
            return []
        self._due = now + self._period_s
        sums = self._sums(loads)
        source, target = sums.index(min(sums)), sums.index(max(sums))
        here = sorted((one for one in loads if one.stage == source), key=lambda one: one.peer)
        if source == target or len(here) < 2:
            return []
        mover = min(here, key=lambda one: one.queue)
        return [] if mover.stays else [Transfer(mover.peer, source, target)]

    def join(self, loads: Sequence[QueuedLoad]) -> int:
        """The stage for a newcomer."""
        sums = self._sums(loads)
        return sums.index(max(sums))

    def _sums(self, loads: Sequence[QueuedLoad]) -> list[float]:
        sums = [0.0] * self._stages
        for one in loads:
            sums[one.stage] += one.queue
        return sums
