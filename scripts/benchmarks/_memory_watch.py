"""Samples the memory of processes over time, from the kernel's counters.

Each sample has the process' private bytes, and its peak since the previous sample (`VmHWM`, which is reset each time),
so no peak is missed. Linux only.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from scripts.process_usage import Look, look_at

_LOOK_S: Final = 0.1


class MemoryWatch:
    """Samples processes periodically in a thread. `looks` has the samples of each process by name."""

    def __init__(self) -> None:
        self.looks: dict[str, list[Look]] = {}
        self._pids: dict[str, int] = {}
        self._over = threading.Event()

    def add(self, name: str, pid: int) -> None:
        self.looks[name] = []
        self._pids = {**self._pids, name: pid}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            for name, pid in self._pids.items():
                with contextlib.suppress(OSError, StopIteration):  # the process has ended
                    self.looks[name].append(look_at(pid))

    def between(self, name: str, begin: float, end: float) -> Span:
        """Memory of a process between two times in Unix seconds."""
        found = [look for look in self.looks[name] if begin <= look.at <= end]
        return Span(max(look.peak for look in found), min(look.private for look in found))


@dataclass(frozen=True, slots=True)
class Span:
    """Memory of a process in a period, in bytes: the highest resident size, and the lowest private size."""

    peak: int
    rest: int

    def beside(self, base: Span) -> Span:
        """The difference to `base`, which is usually a process without a model."""
        return Span(self.peak - base.peak, self.rest - base.rest)


def longest(spans: Mapping[str, Span]) -> Span:
    """The largest values of several processes."""
    return Span(max(span.peak for span in spans.values()), max(span.rest for span in spans.values()))
