"""Send-buffer sizing: a socket buffers only the data that its connection sends within some milliseconds.

Data in a socket's buffer can no longer be overtaken: a call made while megabytes wait there waits for them. But too
little data leaves the connection idle while the event loop does other work. So the amount follows the rate at which the
connection accepts bytes, measured between the moments at which it accepts no more: its buffer is equally full at each
of them. Sans-IO; bounded by constants alone; a peer can only lower the rate of its own connection, by receiving slowly.
"""

from __future__ import annotations

import math
from typing import Final

WAITING_S: Final = 0.03  # sending time of the data in the system's buffer; a busy event loop returns sooner
WAITING_BYTES_MIN: Final = 32 * 1024
KEPT_S: Final = 0.2  # the same if the rate is given
KEPT_BYTES_MIN: Final = 16 * 1024
KEPT_BYTES_MAX: Final = 64 * 1024  # a frame
WAITING_BYTES_MAX: Final = 4 << 20  # reached on lines beyond 2 Gb/s, which send it quickly
_FIRST_BYTES: Final = 256 * 1024  # before anything is known
_SAMPLE_S: Final = 0.01  # shorter intervals between full moments are not measured
_RESTED_S: Final = 0.002  # after this time without a send the buffer may no longer be full
_WEIGHT: Final = 0.5  # of a new sample; large, because slow start doubles the rate with every round trip


class SendBufferSizer:
    """Send buffer of one connection; times in seconds on a monotonic clock."""

    __slots__ = ("_begun_at", "_kept", "_rested_at", "_taken_bytes", "_was_full", "bytes_per_s", "waiting_bytes")

    def __init__(self) -> None:
        self.waiting_bytes = _FIRST_BYTES  # most unsent bytes that the system should hold
        self.bytes_per_s = 0.0  # 0: unknown
        self._begun_at: float | None = None  # start of the current measurement
        self._was_full = False  # whether the buffer was full at its start
        self._taken_bytes = 0  # bytes accepted since then
        self._rested_at = 0.0
        self._kept = False  # the rate is given, not measured

    def begin_small(self) -> None:
        """Start with a small buffer: this connection is one of several, and data in it delays the whole stream."""
        self.waiting_bytes = WAITING_BYTES_MIN  # TCP starts with ten packets per round trip

    def keep(self, bytes_per_s: float) -> None:
        """Set the rate at which bytes leave from now on; infinity if unknown.

        At a rate at which it leaves soon, the buffer may hold back up to one frame: fewer, larger sends save iterations
        of the event loop at both ends.
        """
        self._kept = math.isfinite(bytes_per_s)
        self._begun_at = None
        if self._kept:
            frame_bytes = min(int(bytes_per_s * KEPT_S), KEPT_BYTES_MAX)
            self.waiting_bytes = _bounded(max(int(bytes_per_s * WAITING_S), frame_bytes), KEPT_BYTES_MIN)

    @property
    def batch_bytes(self) -> int:
        """Bytes to prepare for one send: half of what may wait, or a frame if the rate is given."""
        return KEPT_BYTES_MAX if self._kept else self.waiting_bytes // 2

    def begin(self, now: float) -> None:
        """Record that a send begins."""
        if self._begun_at is None or now - self._rested_at > _RESTED_S:
            self._begun_at, self._was_full, self._taken_bytes = now, False, 0

    def took(self, count: int) -> None:
        """Record that the connection accepted `count` bytes."""
        self._taken_bytes += count

    def end(self, now: float) -> bool:
        """Record that a send ends with everything accepted; returns True if `waiting_bytes` must be applied anew."""
        self._rested_at = now
        # A sender slower than the line never meets a full buffer: the line is at least this fast.
        return self._taken_bytes > 4 * self.waiting_bytes and self._sample(now, was_full=False)

    def full(self, now: float) -> bool:
        """Record that the connection accepts no more now; returns True if `waiting_bytes` must be applied anew."""
        if self._was_full:
            return self._sample(now, was_full=True)
        self._begun_at, self._was_full, self._taken_bytes = now, True, 0
        return False

    def _sample(self, now: float, *, was_full: bool) -> bool:
        passed_s = now - self._begun_at if self._begun_at is not None else 0.0
        if passed_s < _SAMPLE_S or self._kept:
            return False
        rate = self._taken_bytes / passed_s
        self._begun_at, self._was_full, self._taken_bytes = now, was_full, 0
        if was_full:
            self.bytes_per_s += (_WEIGHT if self.bytes_per_s else 1.0) * (rate - self.bytes_per_s)
        else:
            self.bytes_per_s = max(rate, self.bytes_per_s)
        wanted = _bounded(int(self.bytes_per_s * WAITING_S), WAITING_BYTES_MIN)
        if 0.8 * self.waiting_bytes < wanted < 1.25 * self.waiting_bytes:
            return False
        self.waiting_bytes = wanted
        return True


def _bounded(count: int, least: int) -> int:
    return min(max(count, least), WAITING_BYTES_MAX)
