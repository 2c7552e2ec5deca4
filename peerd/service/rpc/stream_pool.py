"""Streams that carry one call at a time, kept for the next one: opening one costs both sides more than a small call.

Idle ones are closed when a better way to the peer stands, or when nobody has used them for a while.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from peerd.core.ids import PeerId
from peerd.core.limits import RPC_LANES


class PooledStream(Protocol):
    """A stream that carries calls."""

    used: float  # when its last call ended, in trio time

    @property
    def over(self) -> bool:
        """True when it can carry no further call."""
        ...

    @property
    def superseded(self) -> bool:
        """True when the next call had better take another one: the peer can be reached on a better way by now."""
        ...

    def close(self) -> None:
        """End it; only while it is idle."""
        ...


L = TypeVar("L", bound=PooledStream)


class StreamPool(Generic[L]):
    """Idle lanes, by peer and protocol."""

    def __init__(self) -> None:
        self._idle: dict[tuple[PeerId, str], list[L]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def take(self, peer: PeerId, protocol: str) -> L | None:
        """A lane for the next call; None: a new one has to be opened."""
        lanes = self._idle.get((peer, protocol), [])
        while lanes:
            lane = lanes.pop()
            if not lane.over:
                return lane
        return None

    def keep(self, peer: PeerId, protocol: str, lane: L) -> bool:
        """Keep it for the next call; False: it is of no use, or enough are idle."""
        lanes = self._idle.setdefault((peer, protocol), [])
        if lane.over or lane.superseded or len(lanes) >= RPC_LANES:
            return False
        lanes.append(lane)
        return True

    def move(self, peer: PeerId) -> None:
        """A better way to `peer` stands: what is idle on the old one goes."""
        for (other, _), lanes in self._idle.items():
            if other == peer:
                for lane in [lane for lane in lanes if lane.superseded]:
                    lanes.remove(lane)
                    lane.close()

    def close_idle(self, since: float) -> None:
        """Close those that nobody has used after `since`, and forget those that were lost."""
        for key, lanes in list(self._idle.items()):
            for lane in lanes:
                if lane.used <= since:
                    lane.close()
            lanes[:] = [lane for lane in lanes if not lane.over]
            if not lanes:
                del self._idle[key]
