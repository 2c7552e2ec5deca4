"""Deadline for members that do not confirm a step which others have made, derived from measured times.

A commit is an optimizer step. Once each stage has a member that made it, and half of all members have, the others may
take three times as long as that half took, or three times as long as they took themselves before. Members that are
later are dropped: the others go on, and a late member catches up when it reports again. Decides only; times are
arguments, in seconds.

Hostile input: a member that confirms the step at once shortens the wait for others, but to no less than `_LEAST_S`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from peerd.core.bounded_dict import BoundedDict
from peerd.core.messages.swarm import MAX_MEMBERS

_LEAST_S = 2.0
_FACTOR = 3.0


class LateMovers:
    """The members that one conductor orders to step; `begin` starts the wait for one step."""

    def __init__(self) -> None:
        self._took_s = BoundedDict[str, float](MAX_MEMBERS)  # member -> seconds from its last order to its answer
        self._began, self._most = 0.0, 0.0
        self._stages: dict[str, int] = {}  # mover -> its stage
        self._arrived: set[str] = set()
        self._lacking: set[int] = set()  # stages of which no member has arrived

    def begin(self, now: float, movers: Iterable[tuple[str, int]]) -> None:
        """Start the wait for these members, each given with its stage, which are ordered to make the step."""
        self._stages = dict(movers)
        self._began, self._most, self._arrived = now, math.inf, set()
        self._lacking = set(self._stages.values())

    def arrived(self, now: float, mover: str) -> None:
        """Record that a member has made the step."""
        if mover not in self._stages:
            return
        took_s = now - self._began
        self._took_s[mover] = took_s
        self._arrived.add(mover)
        self._lacking.discard(self._stages[mover])
        if self._most == math.inf and not self._lacking and 2 * len(self._arrived) >= len(self._stages):
            self._most = max(_LEAST_S, _FACTOR * took_s)

    def late(self, now: float, moving: Iterable[str]) -> list[str]:
        """The members among `moving` that are too late, sorted."""
        return sorted(mover for mover in moving if mover in self._stages and now >= self._until(mover))

    def due(self, moving: Iterable[str]) -> float:
        """Time at which the next of the `moving` members is too late, or infinity if there is none."""
        return min((self._until(mover) for mover in moving if mover in self._stages), default=math.inf)

    def _until(self, mover: str) -> float:
        return self._began + max(self._most, _FACTOR * self._took_s.get(mover, 0.0))
