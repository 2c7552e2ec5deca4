"""Failed moves: members that claimed to be able to reach a position, were ordered there, and did not arrive.

After a second failure, a member's claims to reach other positions do not count for a while, longer each time. Otherwise
one peer that claims a state would hold up a swarm that could resume from an older one. A member that is only slow has
more tries. Its claim of its present position still counts. Times are arguments, in seconds. Hostile input: any claims;
as many posts are remembered as a run may have members.
"""

from __future__ import annotations

from collections.abc import Set

from peerd.core.bounded_dict import BoundedDict
from peerd.messages.swarm import MAX_MEMBERS

_SLOW, _FAILED, _MOST = 1, 3, 4  # points of a slow try and of a failed one; points up to which a member is believed
_FIRST_S, _DOUBLINGS = 60.0, 6


class FailedMoves:
    """Failed moves by post. `version` increases with each change of whose claims count."""

    def __init__(self) -> None:
        self._counts = BoundedDict[str, int](MAX_MEMBERS)  # post -> points since it last arrived
        self._doubted: dict[str, float] = {}  # post -> time until which its claims do not count
        self.version = 0

    @property
    def doubted(self) -> Set[str]:
        """Posts whose claims to reach other positions do not count now."""
        return self._doubted.keys()

    def failed(self, now: float, post: str, *, slow: bool = False) -> None:
        """Record that a member did not reach its ordered position. `slow`: not in time; it may still arrive."""
        count = self._counts[post] = self._counts.get(post, 0) + (_SLOW if slow else _FAILED)
        if count > _MOST:
            doublings = min((count - _MOST - 1) // _FAILED, _DOUBLINGS)
            self._doubted[post] = now + _FIRST_S * 2.0**doublings
            self.version += 1

    def arrived(self, post: str) -> None:
        """Record that a member reached its ordered position."""
        self._counts.pop(post, None)
        if self._doubted.pop(post, None) is not None:
            self.version += 1

    def look(self, now: float) -> None:
        """Let members' claims count again whose time of doubt is over."""
        for post in [post for post, until in self._doubted.items() if until <= now]:
            del self._doubted[post]
            self.version += 1
