"""Pace of a process's computing: no more processor time, over a second and longer, than so many processors have.

Counts what the whole process uses, its loop and its encryption too, and has its computing rest for what is too much:
before a job, never inside one. What was not used is not saved up. One for all workers of a process; called in their
threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

BURST_S: Final = 0.1  # of each processor: what a job may begin with after a rest


class CpuPace:
    """See the module's header."""

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
        """Seconds for which computing has to rest now; 0: it may go on."""
        with self._lock:
            now, used_s = self._clock(), self._used()
            gained_s = self._threads * (now - self._at) - (used_s - self._used_s)
            self._credit_s = min(BURST_S * self._threads, self._credit_s + gained_s)
            self._at, self._used_s = now, used_s
            return max(0.0, -self._credit_s / self._threads)

    def rest(self) -> None:
        """Wait until computing may go on, in the calling thread."""
        while (delay_s := self.delay_s()) > 0:
            time.sleep(delay_s)  # a worker's thread: the loop runs on
