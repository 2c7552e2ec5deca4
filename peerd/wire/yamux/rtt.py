"""Pings of one session: liveness, round trip, and the queueing delay on the path from the peer.

Once rails carry the bulk data, a link's first connection carries only small frames, so that a pong waits only in the
queues of the path: its delay beyond the idle round trip is the delay of a call. While bulk data is received, several
pings are in flight at once, so that a queue on a long path is noticed sooner than after a round trip. If the operating
system reports the round trip of incoming data, that is better, because a busy CPU does not lengthen it, and no pings
are needed. A stream on one connection is pinged less often, because its window should fit the whole round trip
including queues. Sans-IO. Hostile input: pongs without a ping are ignored; missing pongs have no effect; early pongs
make the peer's own stream faster than is good for it, within its window.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_MOST: Final = 16  # pings in flight at once
_PER_RTT: Final = 8  # pings per round trip
_PAUSE_S_MIN: Final = 0.01
_SAMPLES: Final = 4  # the least of these many samples counts, because a busy CPU at either end delays some answers
_TOLD_S: Final = 0.5  # how long the system's measurement counts
_AWAKE_S: Final = 0.01  # longest usual interval of calls while bulk arrives; after a longer one pongs may be unread
_ID_WALL: Final = 1 << 32


class RttPings:
    """Pings of one session; times in seconds."""

    __slots__ = ("_id", "_looked_at", "_recent", "_sent_at", "_slept_s", "_told", "_waiting")

    def __init__(self) -> None:
        self._id = 0
        self._waiting: deque[tuple[int, float, float]] = deque()  # (value, sent at, sent at minus `_slept_s`)
        self._sent_at = float("-inf")
        self._recent: deque[float] = deque(maxlen=_SAMPLES)
        self._slept_s = 0.0  # total time between calls of `queue_s` beyond _AWAKE_S
        self._looked_at = float("inf")
        self._told: tuple[float, float] | None = None  # (when, the round trip)

    @property
    def idle(self) -> bool:
        """True if no pong is awaited."""
        return not self._waiting

    def told(self, now: float, rtt_s: float) -> None:
        """Record a round trip of incoming bulk data as measured by the operating system, including queueing delay."""
        self._told = now, rtt_s

    def _news(self, now: float) -> float | None:
        """The operating system's recent round trip in seconds, or None."""
        return self._told[1] if self._told is not None and now - self._told[0] <= _TOLD_S else None

    def due(self, now: float, rtt_s: float) -> bool:
        """Return True if another ping should be sent while bulk data arrives."""
        if self._news(now) is not None:
            return False
        return len(self._waiting) < _MOST and now - self._sent_at >= max(rtt_s / _PER_RTT, _PAUSE_S_MIN)

    def send(self, now: float) -> int:
        """Record that a ping is sent; returns its value."""
        self._id = (self._id + 1) % _ID_WALL
        self._waiting.append((self._id, now, now - self._slept_s))
        self._sent_at = now
        return self._id

    def latest_s(self, smoothed_s: float | None) -> float | None:
        """The current round trip in seconds, including queueing delay; at least the smoothed one."""
        return max(smoothed_s or 0.0, self._recent[-1]) if self._recent else smoothed_s

    def queue_s(self, now: float, rtt_min_s: float | None) -> float | None:
        """Queueing delay of incoming data in seconds, or None while unknown. Called whenever data arrives."""
        told_s = self._news(now)
        if rtt_min_s is not None and told_s is not None:
            return max(told_s - rtt_min_s, 0.0)
        if rtt_min_s is None or not self._recent:
            return None
        self._slept_s += max(now - self._looked_at - _AWAKE_S, 0.0)
        self._looked_at = now
        overdue = len(self._waiting) >= _SAMPLES  # then `late_s` is a lower bound of the next samples' least
        late_s = now - self._slept_s - self._waiting[_SAMPLES - 1][2] if overdue else 0.0
        return max(min(self._recent) - rtt_min_s, late_s - rtt_min_s, 0.0)

    def answered(self, value: int, now: float) -> float | None:
        """The round trip in seconds if the pong answers an awaited ping, else None."""
        if all(each != value for each, *_ in self._waiting):
            return None
        while (first := self._waiting.popleft())[0] != value:
            pass  # pongs arrive in order: the peer has skipped these
        sample_s = now - first[1]
        self._recent.append(sample_s)
        return sample_s
