"""Limits a process's processor time: over a second or longer, it uses at most `threads` processors.

Measures the whole process, including its trio loop and encryption, and makes computing jobs wait for any excess before
they start, never while they run. Unused time is not saved up. One instance for all workers of a process; called in
their threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

BURST_S: Final = 0.1  # per processor: credit of a job after an idle period


class CpuPace:
    """Credit of processor time for one process, with one lock for all its threads."""

    def __init__(
        self,
        threads: int,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self._threads, self._clock, self._used = threads, clock, used
        self._lock = threading.Lock()
        self._credit_s = BURST_S * threads
        self._at, self._used_s = clock(), used()

    def delay_s(self) -> float:
        """Seconds that computing must wait now; 0 if it may start."""
        with self._lock:
            now, used_s = self._clock(), self._used()
            gained_s = self._threads * (now - self._at) - (used_s - self._used_s)
            self._credit_s = min(BURST_S * self._threads, self._credit_s + gained_s)
            self._at, self._used_s = now, used_s
            return max(0.0, -self._credit_s / self._threads)

    def rest(self) -> None:
        """Block the calling thread until computing may start."""
        while (delay_s := self.delay_s()) > 0:
            time.sleep(delay_s)  # only blocks a worker's thread, not the trio loop
