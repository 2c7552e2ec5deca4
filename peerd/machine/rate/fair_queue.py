"""Rate limit of one flow, and start-time fair queue for a rate that many flows share.

Sans-IO. `FairQueue` is start-time fair queueing (Goyal, Vin and Cheng, 1996): each piece is stamped with its place's
own progress, and the smallest stamp passes first. So places with more demand than capacity get equal shares, however
many flows each has, and a place that needs less than its share gets all it needs. Invariant: nothing is stored about a
place that has no piece waiting and is not ahead of the others.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

_BURST_S = 0.05  # unused capacity of this time may be caught up on
_PLACES = 1024  # number above which places that are not ahead are dropped


@dataclass(slots=True)
class FlowPace:
    """One flow with a rate limit of `bytes_per_s`."""

    bytes_per_s: float
    _free_at: float = -math.inf

    def ask(self, now: float, size_bytes: int) -> float:
        """Time at which a piece may pass; call it for one piece at a time."""
        if math.isinf(self.bytes_per_s):
            return now
        passes = max(self._free_at, now - _BURST_S)
        self._free_at = passes + size_bytes / self.bytes_per_s
        return max(passes, now)


@dataclass(slots=True)
class FairQueue:
    """Many flows that share `bytes_per_s`; each has one piece waiting at a time."""

    bytes_per_s: float
    _free_at: float = -math.inf
    _progress: float = 0.0  # stamp of the piece that passed last
    _next: int = 0
    _waiting: list[tuple[float, int, int]] = field(default_factory=list)  # heap of stamp, ticket, bytes
    _ahead: dict[str, float] = field(default_factory=dict)  # by place: stamp of its next piece
    _gone: set[int] = field(default_factory=set)  # withdrawn tickets

    def ask(self, place: str, size_bytes: int) -> int:
        """Queue a piece of a flow of this place; returns its ticket."""
        self._next += 1
        stamp = max(self._progress, self._ahead.get(place, 0.0))
        self._ahead[place] = stamp + size_bytes
        heapq.heappush(self._waiting, (stamp, self._next, size_bytes))
        return self._next

    def give_back(self, ticket: int) -> None:
        """Withdraw a waiting piece."""
        self._gone.add(ticket)

    def pop(self, now: float) -> int | None:
        """The ticket of the piece that may pass now, or None."""
        while self._waiting and self._waiting[0][1] in self._gone:
            self._gone.discard(heapq.heappop(self._waiting)[1])
        if not self._waiting or now < self._free_at:
            return None
        self._progress, ticket, size_bytes = heapq.heappop(self._waiting)
        self._free_at = max(self._free_at, now - _BURST_S) + size_bytes / self.bytes_per_s
        if not self._waiting:
            self._ahead.clear()
            self._gone.clear()
        elif len(self._ahead) > _PLACES:
            self._ahead = {place: stamp for place, stamp in self._ahead.items() if stamp > self._progress}
        return ticket

    def wake_at(self) -> float:
        """Time at which `pop` next returns a piece, unless one is queued earlier; infinity if none waits."""
        return self._free_at if self._waiting else math.inf
