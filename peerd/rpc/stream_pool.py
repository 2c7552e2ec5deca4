"""Idle streams that carry one call at a time, kept for the next call, because opening one costs more than a small call.

Idle streams are closed when there is a better path to the peer, or after a while without use.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

from peerd.core.ids import PeerId
from peerd.core.limits import RPC_LANES


class PooledStream(Protocol):
    """A stream that carries calls, one at a time."""

    used: float  # when its last call ended, in trio time

    @property
    def over(self) -> bool:
        """True if it can carry no further call."""
        ...

    @property
    def superseded(self) -> bool:
        """True if a new stream to the peer would take a better path."""
        ...

    def close(self) -> None:
        """Close it; only while it is idle."""
        ...


L = TypeVar("L", bound=PooledStream)


class StreamPool(Generic[L]):
    """Idle streams (lanes), by peer and protocol."""

    def __init__(self) -> None:
        self._idle: dict[tuple[PeerId, str], list[L]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def take(self, peer: PeerId, protocol: str) -> L | None:
        """Take a lane for the next call, or None if there is none."""
        lanes = self._idle.get((peer, protocol), [])
        while lanes:
            lane = lanes.pop()
            if not lane.over:
                return lane
        return None

    def keep(self, peer: PeerId, protocol: str, lane: L) -> bool:
        """Keep a lane for the next call. Returns False if it is unusable or enough are idle."""
        lanes = self._idle.setdefault((peer, protocol), [])
        if lane.over or lane.superseded or len(lanes) >= RPC_LANES:
            return False
        lanes.append(lane)
        return True

    def move(self, peer: PeerId) -> None:
        """Close idle lanes on the old path, because there is a better path to `peer`."""
        for (other, _), lanes in self._idle.items():
            if other == peer:
                for lane in [lane for lane in lanes if lane.superseded]:
                    lanes.remove(lane)
                    lane.close()

    def close_idle(self, since: float) -> None:
        """Close lanes that were not used after `since`, and drop lost ones."""
        for key, lanes in list(self._idle.items()):
            for lane in lanes:
                if lane.used <= since:
                    lane.close()
            lanes[:] = [lane for lane in lanes if not lane.over]
            if not lanes:
                del self._idle[key]
