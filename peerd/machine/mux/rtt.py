"""Pings of one session: whether the peer is there, how far away it is, and how much waits on the way to us.

A link's first connection carries small frames only once rails take the bulk, so that an answer waits nowhere but in the
queues of the path: what it takes beyond the round trip of the idle path is what a call would wait, too. While bulk is
received several pings are under way at once, since a queue on a long path should be known sooner than a round trip
later. Where the system tells the round trip of what comes in, which no busy processor makes longer, that is better, and
no pings are needed. A stream on one connection asks less often: its window should fit a round trip as it is, queues
and all.
Sans-IO. Hostile input: answers to nothing, which are ignored, and answers that do not come, which say nothing; early
ones make the peer's own stream faster than is good for it, within its window.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_MOST: Final = 16  # under way at once
_PER_RTT: Final = 8
_PAUSE_S_MIN: Final = 0.01
_SAMPLES: Final = 4  # the least of the last ones counts: late answers may be the fault of a processor, here or there
_TOLD_S: Final = 0.5  # so long what the system told is news
_AWAKE_S: Final = 0.01  # between two looks while bulk comes in; after a longer time answers may lie here unread
_ID_WALL: Final = 1 << 32


class RttPings:
    """Pings of one session; times in seconds."""

    __slots__ = ("_id", "_looked_at", "_recent", "_sent_at", "_slept_s", "_told", "_waiting")

    def __init__(self) -> None:
        self._id = 0
        self._waiting: deque[tuple[int, float, float]] = deque()  # (value, sent at, the same less what was slept)
        self._sent_at = float("-inf")
        self._recent: deque[float] = deque(maxlen=_SAMPLES)
        self._slept_s = 0.0  # since the beginning, as far as it was bulk that was waited for
        self._looked_at = float("inf")
        self._told: tuple[float, float] | None = None  # (when, the round trip)

    @property
    def idle(self) -> bool:
        """True when no answer is awaited."""
        return not self._waiting

    def told(self, now: float, rtt_s: float) -> None:
        """The system measures that round trip of bulk that comes in, with what waits on the way."""
        self._told = now, rtt_s

    def _news(self, now: float) -> float | None:
        """The round trip that the operating system told of late; None: it did not."""
        return self._told[1] if self._told is not None and now - self._told[0] <= _TOLD_S else None

    def due(self, now: float, rtt_s: float) -> bool:
        """True when another ping is worth sending while bulk comes in."""
        if self._news(now) is not None:
            return False
        return len(self._waiting) < _MOST and now - self._sent_at >= max(rtt_s / _PER_RTT, _PAUSE_S_MIN)

    def send(self, now: float) -> int:
        """Note that a ping is sent; returns its value."""
        self._id = (self._id + 1) % _ID_WALL
        self._waiting.append((self._id, now, now - self._slept_s))
        self._sent_at = now
        return self._id

    def latest_s(self, smoothed_s: float | None) -> float | None:
        """A round trip as it is now, with what waits on the way; no less than the smoothed one."""
        return max(smoothed_s or 0.0, self._recent[-1]) if self._recent else smoothed_s

    def queue_s(self, now: float, rtt_min_s: float | None) -> float | None:
        """Queueing delay of bytes on their way to us, asked whenever some come; None while that is not known."""
        told_s = self._news(now)
        if rtt_min_s is not None and told_s is not None:
            return max(told_s - rtt_min_s, 0.0)
        if rtt_min_s is None or not self._recent:
            return None
        self._slept_s += max(now - self._looked_at - _AWAKE_S, 0.0)
        self._looked_at = now
        overdue = len(self._waiting) >= _SAMPLES  # the least of those that come next is at least this:
        late_s = now - self._slept_s - self._waiting[_SAMPLES - 1][2] if overdue else 0.0
        return max(min(self._recent) - rtt_min_s, late_s - rtt_min_s, 0.0)

    def answered(self, value: int, now: float) -> float | None:
        """The round trip, when one that is awaited was answered."""
        if all(each != value for each, *_ in self._waiting):
            return None
        while (first := self._waiting.popleft())[0] != value:
            pass  # answers come in order: the peer has skipped these
        sample_s = now - first[1]
        self._recent.append(sample_s)
        return sample_s
