"""Failed moves: members that were ordered to a position they said they could reach, and did not get there.

After a second failure their word on where they could go does not count for a while, longer each time: else one peer
that says it has a state would hold up a swarm that could go on from an older one. A member that is only slow has more
tries. Where they say that they stand still counts.
Times are arguments, in seconds. Hostile input: any claims; so many posts are remembered as a run has members.
"""

from __future__ import annotations

from collections.abc import Set

from peerd.core.bounded_dict import BoundedDict
from peerd.core.messages.swarm import MAX_MEMBERS

_SLOW, _FAILED, _MOST = 1, 3, 4  # what a try that took too long, and one that failed, count, and what is no lie yet
_FIRST_S, _DOUBLINGS = 60.0, 6


class FailedMoves:
    """See the module's header. `version` grows with each change of whose word counts."""

    def __init__(self) -> None:
        self._counts = BoundedDict[str, int](MAX_MEMBERS)  # post -> what its tries count since it last arrived
        self._doubted: dict[str, float] = {}  # post -> until when its word does not count
        self.version = 0

    @property
    def doubted(self) -> Set[str]:
        """The posts whose word on where they could go does not count now."""
        return self._doubted.keys()

    def failed(self, now: float, post: str, *, slow: bool = False) -> None:
        """A member did not get where it was ordered to. `slow`: not in time, and it may still do so."""
        count = self._counts[post] = self._counts.get(post, 0) + (_SLOW if slow else _FAILED)
        if count > _MOST:
            doublings = min((count - _MOST - 1) // _FAILED, _DOUBLINGS)
            self._doubted[post] = now + _FIRST_S * 2.0**doublings
            self.version += 1

    def arrived(self, post: str) -> None:
        """A member got where it was ordered to."""
        self._counts.pop(post, None)
        if self._doubted.pop(post, None) is not None:
            self.version += 1

    def look(self, now: float) -> None:
        """Time passed: words count again."""
        for post in [post for post, until in self._doubted.items() if until <= now]:
            del self._doubted[post]
            self.version += 1
