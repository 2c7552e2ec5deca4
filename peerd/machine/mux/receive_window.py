"""Receive windows of a session: the credit that its peer gets, and how windows grow within a budget.

Credit for a stream on one connection is returned in steps of half a window or 2 MiB, and a window that is used up
within a round trip and a half doubles. A striped stream gets as much as should be under way (see `bdp_window`), and
memory for what a lost packet keeps from its turn. Invariants: what is granted, held and unread never exceeds a stream's
target, and targets beyond the initial window are paid from the budget.
"""

from __future__ import annotations

from typing import Final

from peerd.machine.mux.frames import WINDOW
from peerd.machine.mux.reassembly import Reassembly
from peerd.machine.mux.send_queue import SendQueue
from peerd.machine.mux.stream import INITIAL_WINDOW, WindowBudget, YamuxConfig, YamuxStream

_GRANT_BYTES: Final = 2 << 20  # of credit, to be told at once: a path should hold nearly a whole window, not half
_FLIGHTS: Final = 3  # a striped stream's window, in what should be under way
_TUNE_RTT_FLOOR_S: Final = 0.002  # below it scheduling, not the path, limits the rate


class ReceiveWindow:
    """Credit of the streams of one session."""

    __slots__ = ("_budget", "_config", "_queue", "_usual_target")

    def __init__(self, config: YamuxConfig, budget: WindowBudget, queue: SendQueue) -> None:
        self._config, self._budget, self._queue = config, budget, queue
        self._usual_target = INITIAL_WINDOW  # what windows on this link grow to

    def consumed(self, stream: YamuxStream, now: float, rtt_s: float | None) -> bool:
        """Bytes were taken from the inbox: give the peer credit when half a window is free.

        True when half a window has gone by and was not found to be too small for such a round trip.
        """
        free = stream.target - stream.credit - stream.inbox_bytes
        if free < min(stream.target // 2, _GRANT_BYTES):
            return False
        stream.passed_bytes += free
        more, half = 0, stream.passed_bytes * 2 >= stream.target
        if half:
            more = self._grow(stream, now, rtt_s)
            stream.granted_at, stream.passed_bytes = now, 0
        stream.credit += free + more
        self._tell_credit(stream, free + more)
        return half and not more

    def flow(
        self,
        stream: YamuxStream,
        held: Reassembly,
        arrived: int,
        now: float,
        rtt_s: float | None,
        queue_s: float | None,
    ) -> None:
        """Credit for a striped stream, as its bytes come or are read: as much as should be under way, if there is
        memory for it and for what a lost packet keeps from its turn."""
        held.flight.arrived(arrived, now, rtt_s or _TUNE_RTT_FLOOR_S, queue_s)
        limit = held.flight.limit_bytes
        more = min(_FLIGHTS * limit, self._config.window_bytes_max, stream.window_bytes_max) - stream.target
        if more > 0 and self._budget.take(more):
            stream.target += more
            self._usual_target = max(self._usual_target, limit)
        free = stream.target - stream.credit - stream.inbox_bytes - held.bytes
        room = min(free, limit - stream.credit)
        if room > 0 and room >= min(limit // 16, stream.target // 2):
            stream.credit += room
            self._tell_credit(stream, room)

    def _tell_credit(self, stream: YamuxStream, grant: int) -> None:
        flags, owed = stream.flags_due, stream.owed
        stream.flags_due = stream.owed = 0
        self._queue.frame(WINDOW, flags, stream.id, grant + owed)

    def presume(self, stream: YamuxStream) -> None:
        """Start a new stream with the window that others on this link have needed, as far as that is cheap."""
        extra = min(self._usual_target - INITIAL_WINDOW, (self._budget.limit_bytes - self._budget.used_bytes) // 4)
        if extra > 0 and self._budget.take(extra):
            stream.target += extra
            stream.credit += extra
            stream.owed = extra

    def _grow(self, stream: YamuxStream, now: float, rtt_s: float | None) -> int:
        """Double the window when half of it went by within a round trip and a half; returns the bytes added."""
        if rtt_s is None or now - stream.granted_at > 1.5 * max(rtt_s, _TUNE_RTT_FLOOR_S):
            return 0
        more = min(stream.target, min(self._config.window_bytes_max, stream.window_bytes_max) - stream.target)
        if more <= 0 or not self._budget.take(more):
            return 0
        stream.target += more
        self._usual_target = max(self._usual_target, stream.target)
        return more
