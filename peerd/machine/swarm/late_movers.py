"""The wait for members that do not say that they got where others have got: measured, and not a constant.

A commit is an optimizer step; a swarm that goes on from another position loads a checkpoint. Once each stage has a
member that did it, and half of those that are known have, the rest may take three times as long as that half; for a
step also three times as long as they took themselves before. Members that are later than that are lost to it: the
others go on, and a late member catches up when it reports again. Decides only; times are arguments, in seconds. Hostile
input: a member that says at once that it has done it shortens the wait for others, but to `_LEAST_S` at least; members
that nobody knows do not lengthen it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set

from peerd.core.bounded_dict import BoundedDict
from peerd.core.messages.swarm import MAX_MEMBERS

_LEAST_S = 2.0
_FACTOR = 3.0


class LateMovers:
    """See the module's header. One conductor's; `begin` starts the wait for one step's movers."""

    def __init__(self) -> None:
        self._took_s = BoundedDict[str, float](MAX_MEMBERS)  # member -> seconds from the order to its answer, of late
        self._began, self._most, self._steps = 0.0, 0.0, True
        self._known: Set[str] = frozenset()
        self._stages: dict[str, int] = {}  # mover -> its stage
        self._arrived: set[str] = set()
        self._lacking: set[int] = set()  # stages of which nobody has arrived

    def begin(
        self, now: float, stages: Mapping[str, int], known: Collection[str], there: Collection[int] = (), *, steps: bool
    ) -> None:
        """Members, each with its stage, are ordered to make a step, or to go elsewhere.

        `known`: those that were part of the run; `there`: stages of which a member is there already.
        """
        self._stages, self._steps = dict(stages), steps
        self._known = set(known) or self._stages.keys()
        self._began, self._most, self._arrived = now, math.inf, set()
        self._lacking = set(stages.values()) - set(there)

    def arrived(self, now: float, mover: str) -> None:
        """A member has got there."""
        if mover not in self._stages:
            return
        stage, took_s = self._stages[mover], now - self._began
        if self._steps:
            self._took_s[mover] = took_s
        self._arrived.add(mover)
        if mover in self._known or all(self._stages[one] != stage for one in self._known):
            self._lacking.discard(stage)
        if self._most == math.inf and not self._lacking and 2 * len(self._arrived & self._known) >= len(self._known):
            self._most = max(_LEAST_S, _FACTOR * took_s)

    def late(self, now: float, moving: Iterable[str]) -> list[str]:
        """Those of the members on their way that are too late, sorted."""
        return sorted(mover for mover in moving if mover in self._stages and now >= self._until(mover))

    def due(self, moving: Iterable[str]) -> float:
        """The time at which the next of the members on their way is too late; infinite: none is."""
        return min((self._until(mover) for mover in moving if mover in self._stages), default=math.inf)

    def _until(self, mover: str) -> float:
        own_s = self._took_s.get(mover, 0.0) if self._steps else 0.0
        return self._began + max(self._most, _FACTOR * own_s)
