"""How much of a striped stream should be under way: what the path carries in a round trip, and a little more.

Each connection of a link fills the queues on its way for itself; several that are each allowed a whole window fill
them to the brim, lose packets, and delay everybody's calls. The receiver knows better: bytes arrive at the rate of the
path, so as much credit as that rate times the round trip keeps it full. While the rate grows the credit is half
as much again; then a little is added, which waits in the path's queue and notices when there is more to be had.
Sans-IO. A sender can lower its own stream's rate only.
"""

from __future__ import annotations

from collections import deque
from typing import Final

FLOOR_BYTES: Final = 512 * 1024  # whatever the rate
_START_BYTES: Final = 1 << 20  # as long as the rate grows, and at least
_START_BYTES_PER_S: Final = 25e6  # what this makes: a start that no path of interest minds
_EPOCH_S_MIN: Final = 0.02
_EPOCHS: Final = 8  # whose second best rate counts: neither a lost packet nor a burst is another path
_PAUSE_EPOCHS: Final = 3
_GREW: Final = 1.1  # two rates in a row over the best before: there is more to be had,
_GROWS_EPOCHS: Final = 2  # so long after that,
_GROWTH: Final = 0.5  # of a round trip is added then,
_GROWTH_S_MAX: Final = 0.1  # and no more than this: it is what queues when the end is reached
_QUEUED: Final = 0.25  # of a round trip, that may wait on the way,
_QUEUED_S_MAX: Final = 0.03  # and no more than this, except
_PROBE_EPOCHS: Final = 2  # of each _EPOCHS: far away so little would show too late that there is more to be had


class Flight:
    """Of one stream that is received; times in seconds."""

    __slots__ = ("_begun_at", "_bytes", "_epochs", "_grew_ago", "_rates", "limit_bytes")

    def __init__(self, now: float) -> None:
        self._begun_at, self._bytes = now, 0
        self._rates: deque[float] = deque(maxlen=_EPOCHS)
        self._grew_ago = 0  # epochs
        self._epochs = 0
        self.limit_bytes = _START_BYTES

    def arrived(self, size: int, now: float, rtt_s: float) -> None:
        """So many bytes have come; the round trip is that of the idle path."""
        self._bytes += size
        passed_s = now - self._begun_at
        epoch_s = max(rtt_s, _EPOCH_S_MIN)
        if passed_s < epoch_s:
            return
        if passed_s > _PAUSE_EPOCHS * epoch_s:  # nothing was sent for a while: that says nothing of the path
            self._begun_at, self._bytes = now, 0
            return
        rate = self._bytes / passed_s
        self._begun_at, self._bytes = now, 0
        self._rates.append(rate)
        self._epochs += 1
        *older, last, newest = (0.0, 0.0, *self._rates)
        grew = min(last, newest) > _GREW * max(older, default=0.0)
        self._grew_ago = 0 if grew else self._grew_ago + 1
        if self._grew_ago < _GROWS_EPOCHS:
            limit = max(self._rates) * (rtt_s + min(_GROWTH * rtt_s, _GROWTH_S_MAX))
            self.limit_bytes = int(max(limit, _START_BYTES, _START_BYTES_PER_S * rtt_s))
        else:
            wait_s = _QUEUED * rtt_s
            if self._epochs % _EPOCHS >= _PROBE_EPOCHS:
                wait_s = min(wait_s, _QUEUED_S_MAX)
            limit = sorted(self._rates)[-2:][0] * (rtt_s + wait_s)
            self.limit_bytes = int(max(limit, FLOOR_BYTES))
