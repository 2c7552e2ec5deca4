"""Processor time and memory of processes, from the kernel's counters in /proc. Linux only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
RESET_PEAK: Final = "5"  # written to /proc/PID/clear_refs


def cpu_s(pid: int) -> float:
    """Processor time of a process, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def busy_s() -> float:
    """Processor time that this machine has spent on anything since its start, including time stolen by its host."""
    user, nice, system, _idle, _wait, irq, softirq, stolen, *_ = (
        Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return sum(map(int, (user, nice, system, irq, softirq, stolen))) / TICKS_PER_S


def others_s(pids: Iterable[int]) -> float:
    """Processor time that this machine has spent on everything except these processes."""
    return busy_s() - sum(map(cpu_s, pids))


def resident_bytes(pid: int) -> int:
    """Current resident memory, or 0 after the process has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def resident_peak(pid: int | str = "self") -> int:
    """Peak resident size of a process since its start, or since the peak was reset."""
    return _kib(Path(f"/proc/{pid}/status"), "VmHWM:")


@dataclass(frozen=True, slots=True)
class Look:
    """One memory sample of a process, in bytes."""

    at: float  # Unix seconds
    peak: int  # highest resident size since the previous sample
    private: int  # current private bytes


def look_at(pid: int) -> Look:
    """Sample the memory of a process, and reset its peak."""
    peak = resident_peak(pid)
    Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
    rollup = Path(f"/proc/{pid}/smaps_rollup")
    return Look(time.time(), peak, _kib(rollup, "Private_Clean:") + _kib(rollup, "Private_Dirty:"))


def _kib(file: Path, key: str) -> int:
    line = next(line for line in file.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10
