"""Memory of processes over time, by the kernel's own counts.

Each look reads the most that a process has held since the look before (`VmHWM`, which is set back every time), so no
peak between two looks is missed, and its private bytes. Linux only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LOOK_S: Final = 0.1
_SET_BACK: Final = "5"  # of /proc/PID/clear_refs: the peak begins anew


@dataclass(frozen=True, slots=True)
class Look:
    """One look at one process, in bytes."""

    at: float  # Unix seconds
    peak: int  # resident, since the look before
    private: int  # nobody else's, now


def resident_peak(pid: int | str = "self") -> int:
    """The most that a process has been resident with since its start, or since it was set back."""
    return _kib(Path(f"/proc/{pid}/status"), "VmHWM:")


def look_at(pid: int) -> Look:
    """The state of a process now; its peak begins anew."""
    peak = resident_peak(pid)
    Path(f"/proc/{pid}/clear_refs").write_text(_SET_BACK)
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    return Look(time.time(), peak, _kib(rollup, "Private_Clean:") + _kib(rollup, "Private_Dirty:"))


def _kib(file: Path, key: str) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


class MemoryWatch:
    """Looks at processes again and again, on a thread; `looks` has what was seen of each, by name."""

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
                with contextlib.suppress(OSError, StopIteration):  # it has ended
                    self.looks[name].append(look_at(pid))

    def between(self, name: str, begin: float, end: float) -> Span:
        """What one process held in that time."""
        found = [look for look in self.looks[name] if begin <= look.at <= end]
        return Span(max(look.peak for look in found), min(look.private for look in found))


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that a process held in some time: the most that was resident, the least that was its own."""

    peak: int
    rest: int

    def beside(self, base: Span) -> Span:
        """What it held beside what a process without a model does."""
        return Span(self.peak - base.peak, self.rest - base.rest)


def longest(spans: Mapping[str, Span]) -> Span:
    """The most of each over several processes."""
    return Span(max(span.peak for span in spans.values()), max(span.rest for span in spans.values()))
