"""Send-buffer sizing: a connection holds what it takes away within some milliseconds, and no more.

What lies in a socket's buffer can no longer be overtaken: a call made while megabytes wait there waits for them. Too
little leaves the line idle while we look elsewhere. So the amount follows the rate at which the connection takes bytes,
measured between the moments at which it takes no more for now: its buffer is equally full at each of them.
Sans-IO; bounded by constants alone; a peer can lower the rate of its own connection only, by taking bytes slowly.
"""

from __future__ import annotations

import math
from typing import Final

WAITING_S: Final = 0.03  # of sending, that may wait in the system's buffer: a busy loop comes round sooner
WAITING_BYTES_MIN: Final = 32 * 1024
KEPT_S: Final = 0.2  # likewise, where the rate is given
KEPT_BYTES_MIN: Final = 16 * 1024
KEPT_BYTES_MAX: Final = 64 * 1024  # a frame
WAITING_BYTES_MAX: Final = 4 << 20  # of lines beyond 2 Gb/s, where it is soon gone
_FIRST_BYTES: Final = 256 * 1024  # before anything is known
_SAMPLE_S: Final = 0.01  # times between full moments that are shorter say little
_RESTED_S: Final = 0.002  # without a send for so long, the buffer was perhaps less full than we think
_WEIGHT: Final = 0.5  # of a new sample; slow start doubles the rate with every round trip


class SendBufferSizer:
    """Send buffer of one connection; times in seconds on any clock that does not go back."""

    __slots__ = ("_begun_at", "_kept", "_rested_at", "_taken_bytes", "_was_full", "bytes_per_s", "waiting_bytes")

    def __init__(self) -> None:
        self.waiting_bytes = _FIRST_BYTES  # unsent bytes that the system should hold at most
        self.bytes_per_s = 0.0  # 0: not known
        self._begun_at: float | None = None  # of what is counted now
        self._was_full = False  # then
        self._taken_bytes = 0  # since then
        self._rested_at = 0.0
        self._kept = False  # the rate is given, not measured

    def begin_small(self) -> None:
        """The connection carries a part of something larger, so what waits in it keeps the rest waiting."""
        self.waiting_bytes = WAITING_BYTES_MIN  # it begins with ten packets a round trip

    def keep(self, bytes_per_s: float) -> None:
        """From now on bytes leave at this rate; inf: nobody knows.

        More may wait then, up to a frame, if it is soon gone: each send costs a turn of the loop, here and there.
        """
        self._kept = math.isfinite(bytes_per_s)
        self._begun_at = None
        if self._kept:
            frame_bytes = min(int(bytes_per_s * KEPT_S), KEPT_BYTES_MAX)
            self.waiting_bytes = _bounded(max(int(bytes_per_s * WAITING_S), frame_bytes), KEPT_BYTES_MIN)

    @property
    def batch_bytes(self) -> int:
        """Bytes worth preparing for one send: half of what may wait, or a frame where the rate is given."""
        return KEPT_BYTES_MAX if self._kept else self.waiting_bytes // 2

    def begin(self, now: float) -> None:
        """A send begins."""
        if self._begun_at is None or now - self._rested_at > _RESTED_S:
            self._begun_at, self._was_full, self._taken_bytes = now, False, 0

    def took(self, count: int) -> None:
        """The connection took so many bytes."""
        self._taken_bytes += count

    def end(self, now: float) -> bool:
        """A send ends, and all was taken. True: tell the system the new `waiting_bytes`."""
        self._rested_at = now
        # A sender slower than the line never meets a full buffer: the line is at least this fast.
        return self._taken_bytes > 4 * self.waiting_bytes and self._sample(now, was_full=False)

    def full(self, now: float) -> bool:
        """The connection takes no more for now. True: tell the system the new `waiting_bytes`."""
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
