"""Receive windows of a session: the credit granted to the peer, and how windows grow within a budget.

Credit for a stream on one connection is granted in steps of half a window or 2 MiB; a window that is used up within one
and a half round trips doubles. A striped stream gets credit for the data that should be in flight (see `bdp_window`),
and memory for the data that must wait for a lost packet. Invariants: credit, held and unread bytes together never
exceed a stream's target; targets beyond the initial window are paid from the budget.
"""

from __future__ import annotations

from typing import Final

from peerd.wire.yamux.frames import WINDOW
from peerd.wire.yamux.reassembly import Reassembly
from peerd.wire.yamux.send_queue import SendQueue
from peerd.wire.yamux.stream import INITIAL_WINDOW, WindowBudget, YamuxConfig, YamuxStream

_GRANT_BYTES: Final = 2 << 20  # credit that is granted at once, so that nearly a whole window can be in flight
_FLIGHTS: Final = 3  # a striped stream's window, as a multiple of the data that should be in flight
_TUNE_RTT_FLOOR_S: Final = 0.002  # below it scheduling, not the path, limits the rate


class ReceiveWindow:
    """Credit of the streams of one session."""

    __slots__ = ("_budget", "_config", "_queue", "_usual_target")

    def __init__(self, config: YamuxConfig, budget: WindowBudget, queue: SendQueue) -> None:
        self._config, self._budget, self._queue = config, budget, queue
        self._usual_target = INITIAL_WINDOW  # size that windows on this link have grown to

    def consumed(self, stream: YamuxStream, now: float, rtt_s: float | None) -> bool:
        """Record that bytes were read from the inbox; grant credit if half a window is free.

        Returns True if half a window has passed without the window growing.
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
        """Grant credit for a striped stream when its bytes arrive or are read.

        The target is the data that should be in flight, and memory for what waits behind a lost packet, if the budget
        allows it.
        """
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
        """Start a new stream with the window that others on this link have needed, if the budget easily allows it."""
        extra = min(self._usual_target - INITIAL_WINDOW, (self._budget.limit_bytes - self._budget.used_bytes) // 4)
        if extra > 0 and self._budget.take(extra):
            stream.target += extra
            stream.credit += extra
            stream.owed = extra

    def _grow(self, stream: YamuxStream, now: float, rtt_s: float | None) -> int:
        """Double the window if half of it was used within one and a half round trips; returns the bytes added."""
        if rtt_s is None or now - stream.granted_at > 1.5 * max(rtt_s, _TUNE_RTT_FLOOR_S):
            return 0
        more = min(stream.target, min(self._config.window_bytes_max, stream.window_bytes_max) - stream.target)
        if more <= 0 or not self._budget.take(more):
            return 0
        stream.target += more
        self._usual_target = max(self._usual_target, stream.target)
        return more
