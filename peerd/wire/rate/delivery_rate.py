"""Delivery rate of a path from samples: the third highest of the newest ones, and whether it still grows.

With the third highest, neither a lost packet nor the burst of bytes that had waited for it changes the estimate. A rate
whose last two samples exceed all earlier ones has not reached the path's limit. Sans-IO, bounded by the number of
samples.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_GREW: Final = 1.1  # ratio of the last two samples to the best earlier one that counts as growth
_GROWS_SAMPLES: Final = 2  # samples after such growth during which the rate counts as growing

FLOOR_BYTES: Final = 512 * 1024  # least credit at any rate
_START_BYTES: Final = 1 << 20  # least credit while the rate grows
_START_BYTES_PER_S: Final = 40e6  # also: the credit for at least this rate, which no relevant path minds
_EPOCH_S_MIN: Final = 0.02
_EPOCHS: Final = 8  # epochs whose rates count
_PAUSE_EPOCHS: Final = 3  # an epoch longer than this many usual ones had a pause
_GROWTH: Final = 0.5  # growth per round trip, as a fraction of it, while the rate grows or no queue is seen
_GROWTH_S_MAX: Final = 0.06  # limit of that growth, because it is what queues when the path is full
_AHEAD_S_MAX: Final = 0.15  # most time by which the credit may exceed the recent rate's round trip
_RECENT: Final = 3  # epochs that make up the recent rate
_QUEUED: Final = 0.25  # allowed queueing delay as a fraction of a round trip
_QUEUED_S_MAX: Final = 0.03  # limit of that delay if the queue is measured
_EMPTY: Final = 0.5  # the queue counts as empty below this fraction of the allowed delay
_EMPTY_S_MIN: Final = 0.004  # shorter delays count as empty, because they may come from a busy CPU
_FULL: Final = 1.2  # the queue is too long above this multiple of the allowed delay
_KNOWN_EPOCHS: Final = 16  # epochs after a long queue in which the credit grows slowly, as the limit is near


class PathRate:
    """Samples of a path's rate in bytes/s, oldest first."""

    __slots__ = ("grew_ago", "rates")

    def __init__(self, samples: int) -> None:
        """`samples`: number of samples to keep."""
        self.rates: deque[float] = deque(maxlen=samples)
        self.grew_ago = 0  # samples since the rate grew

    def add(self, rate: float) -> None:
        self.rates.append(rate)
        *older, last, newest = (0.0, 0.0, *self.rates)
        grew = min(last, newest) > _GREW * max(older, default=0.0)
        self.grew_ago = 0 if grew else self.grew_ago + 1

    @property
    def grows(self) -> bool:
        """True until the path's limit is reached; also while there are few samples."""
        return self.grew_ago < _GROWS_SAMPLES

    @property
    def carried(self) -> float:
        """The third highest sample, or the lowest of fewer; 0 without samples."""
        return min(sorted(self.rates)[-3:], default=0.0)


class BdpWindow:
    """Credit of a striped stream by bandwidth-delay product: the bytes that the path carries in a round trip, plus a
    margin.

    Each connection of a link fills the queues of its path on its own; several that are each allowed a whole window fill
    them completely, lose packets, and delay everybody's calls. The receiver can do better: bytes arrive at the path's
    rate, so credit of that rate times the round trip keeps the path full, and pings measure the queues (see `rtt`). If
    no queue is seen, the limit may be the credit, the connections or the path, and the credit grows with the arriving
    bytes. If the queue is too long, the credit is the recent rate times the round trip, plus a margin. While the rate
    grows at the start, the credit stays ahead of it. Sans-IO. A sender can lower its own stream's rate, or make its
    window grow within the window limits.
    """

    __slots__ = ("_begun_at", "_bytes", "_full_ago", "_path", "limit_bytes")

    def __init__(self, now: float) -> None:
        self._begun_at, self._bytes = now, 0
        self._path = PathRate(_EPOCHS)
        self._full_ago = _KNOWN_EPOCHS  # epochs since the queue was too long
        self.limit_bytes = _START_BYTES

    def arrived(self, size: int, now: float, rtt_s: float, queue_s: float | None = None) -> None:
        """Record `size` received bytes. `rtt_s`: round trip of the idle path; `queue_s`: queueing delay, if known."""
        self._bytes += size
        wait_s = _QUEUED * rtt_s if queue_s is None else min(_QUEUED * rtt_s, _QUEUED_S_MAX)
        free = queue_s is not None and queue_s <= max(_EMPTY * wait_s, _EMPTY_S_MIN)
        if free and self._path.rates:
            self._seek(size, rtt_s, wait_s)
        if now - self._begun_at >= max(rtt_s, _EPOCH_S_MIN):
            full = queue_s is None or queue_s > max(_FULL * wait_s, _EMPTY_S_MIN)
            self._epoch(now, rtt_s, wait_s, free=free, full=full)

    def _seek(self, size: int, rtt_s: float, wait_s: float) -> None:
        """Raise the limit a little, because bytes arrived and the queue is empty."""
        recent = list(self._path.rates)[-_RECENT:]
        most = min(sum(recent) / len(recent), recent[-1]) * (rtt_s + min(rtt_s, _AHEAD_S_MAX))
        if self.limit_bytes < most:
            more_s = _GROWTH_S_MAX if self._full_ago >= _KNOWN_EPOCHS else wait_s
            self.limit_bytes += int(size * min(_GROWTH, more_s / rtt_s))

    def _epoch(self, now: float, rtt_s: float, wait_s: float, *, free: bool, full: bool) -> None:
        passed_s, size = now - self._begun_at, self._bytes
        self._begun_at, self._bytes = now, 0
        if passed_s > _PAUSE_EPOCHS * max(rtt_s, _EPOCH_S_MIN):
            return  # the sender paused, so the rate is not that of the path
        path = self._path
        path.add(size / passed_s)
        if path.grows:
            limit = max(path.rates) * (rtt_s + min(_GROWTH * rtt_s, _GROWTH_S_MAX))
            least = max(_START_BYTES, _START_BYTES_PER_S * rtt_s, self.limit_bytes if free else 0)
            self.limit_bytes = int(max(limit, least))
        elif full:
            limit = path.carried * (rtt_s + wait_s)
            self.limit_bytes = int(max(limit, FLOOR_BYTES))
        self._full_ago = 0 if full and path.grew_ago else self._full_ago + 1
