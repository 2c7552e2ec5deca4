"""Credit of a striped stream by bandwidth-delay product: what the path carries in a round trip, and a little more.

Each connection of a link fills the queues on its way for itself; several that are each allowed a whole window fill
them to the brim, lose packets, and delay everybody's calls. The receiver knows better: bytes arrive at the rate of the
path, so as much credit as that rate times the round trip keeps it full, and pings say how long the queues are (see
`rtt`). Where nothing waits, nobody knows whether the credit, the connections or the path are the limit, and the
credit grows with what arrives; where too much waits, it is what the rate of late makes in a round trip, and a little.
As long as a start makes the rate grow, the credit stays ahead of it.
Sans-IO. A sender can lower its own stream's rate; or have its window made larger, within what windows may be at all.
"""

from __future__ import annotations

from typing import Final

from peerd.machine.rate.delivery_rate import PathRate

FLOOR_BYTES: Final = 512 * 1024  # whatever the rate
_START_BYTES: Final = 1 << 20  # as long as the rate grows, and at least
_START_BYTES_PER_S: Final = 40e6  # what this makes: a start that no path of interest minds
_EPOCH_S_MIN: Final = 0.02
_EPOCHS: Final = 8  # whose rates count
_PAUSE_EPOCHS: Final = 3
_GROWTH: Final = 0.5  # of a round trip is added in one while the rate grows, and where nothing waits,
_GROWTH_S_MAX: Final = 0.06  # and no more than this: it is what queues when the end is reached
_AHEAD_S_MAX: Final = 0.15  # of what came in the last _RECENT epochs, or a round trip of it: more was not asked for
_RECENT: Final = 3
_QUEUED: Final = 0.25  # of a round trip, that may wait on the way,
_QUEUED_S_MAX: Final = 0.03  # and no more than this where it is seen
_EMPTY: Final = 0.5  # of that: nothing waits that is worth the name,
_EMPTY_S_MIN: Final = 0.004  # nor if it may be for want of a processor
_FULL: Final = 1.2  # of that: more waits than should
_KNOWN_EPOCHS: Final = 16  # after a queue was seen: there is little more to be had, so it is sought slowly


class BdpWindow:
    """Window of one stream that is received; times in seconds."""

    __slots__ = ("_begun_at", "_bytes", "_full_ago", "_path", "limit_bytes")

    def __init__(self, now: float) -> None:
        self._begun_at, self._bytes = now, 0
        self._path = PathRate(_EPOCHS)
        self._full_ago = _KNOWN_EPOCHS  # epochs since too much waited
        self.limit_bytes = _START_BYTES

    def arrived(self, size: int, now: float, rtt_s: float, queue_s: float | None = None) -> None:
        """So many bytes have come; the round trip is that of the idle path, what waits on it may be unknown."""
        self._bytes += size
        wait_s = _QUEUED * rtt_s if queue_s is None else min(_QUEUED * rtt_s, _QUEUED_S_MAX)
        free = queue_s is not None and queue_s <= max(_EMPTY * wait_s, _EMPTY_S_MIN)
        if free and self._path.rates:
            self._seek(size, rtt_s, wait_s)
        if now - self._begun_at >= max(rtt_s, _EPOCH_S_MIN):
            full = queue_s is None or queue_s > max(_FULL * wait_s, _EMPTY_S_MIN)
            self._epoch(now, rtt_s, wait_s, free=free, full=full)

    def _seek(self, size: int, rtt_s: float, wait_s: float) -> None:
        """So many bytes have come and nothing waits: allow some more."""
        recent = list(self._path.rates)[-_RECENT:]
        most = min(sum(recent) / len(recent), recent[-1]) * (rtt_s + min(rtt_s, _AHEAD_S_MAX))
        if self.limit_bytes < most:
            more_s = _GROWTH_S_MAX if self._full_ago >= _KNOWN_EPOCHS else wait_s
            self.limit_bytes += int(size * min(_GROWTH, more_s / rtt_s))

    def _epoch(self, now: float, rtt_s: float, wait_s: float, *, free: bool, full: bool) -> None:
        passed_s, size = now - self._begun_at, self._bytes
        self._begun_at, self._bytes = now, 0
        if passed_s > _PAUSE_EPOCHS * max(rtt_s, _EPOCH_S_MIN):
            return  # nothing was sent for a while: that says nothing of the path
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
