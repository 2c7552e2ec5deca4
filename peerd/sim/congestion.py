"""A sender's congestion window on a path without loss, as TCP has it: slow start, and a fall while nothing is sent.

It begins with ten packets (RFC 6928), grows by what is acknowledged while it is what holds the sender back (RFC 5681),
and is halved for each retransmission time in which nothing was sent, down to where it began (RFC 2861; Linux does so by
default). So who sends in bursts, some round trips apart, needs some round trips of each to be as quick as before.
"""

from __future__ import annotations

from typing import Final

INITIAL_BYTES: Final = 10 * 1448


class CongestionWindow:
    """See the module's header. `now`: seconds, never less than before."""

    def __init__(self, retransmit_s: float) -> None:
        self.bytes = INITIAL_BYTES
        self._retransmit_s = retransmit_s
        self._under_way = 0  # sent and not acknowledged
        self._sent_at: float | None = None
        self._held_back = False

    def room(self, now: float) -> int:
        """The number of bytes that may be sent now."""
        if self._sent_at is not None and not self._under_way:
            rests = min(int((now - self._sent_at) / self._retransmit_s), 64)
            if rests:
                self.bytes = max(INITIAL_BYTES, self.bytes >> rests)
                self._sent_at += rests * self._retransmit_s
        return max(0, self.bytes - self._under_way)

    def sent(self, size: int, now: float) -> None:
        """Count bytes that leave."""
        self._under_way += size
        self._sent_at = now
        self._held_back = self._under_way >= self.bytes

    def acknowledged(self, size: int) -> None:
        """Count bytes that have arrived, as the sender hears of it."""
        if self._held_back:
            self.bytes += size
        self._under_way -= size
