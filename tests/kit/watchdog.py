"""Notices when one step of one task keeps the trio loop to itself for too long.

A step that computes counts with its processor time, so that a busy machine does not fail a test; one that waits
(a blocking call) counts with the time on the wall, less what it could have run and got no processor. A collection of
garbage counts as well, but it searches only what was made since the run began: what a session of thousands of tests
holds is set aside, for to search that takes longer than the limit and says nothing about the code. Only for runs on the
real clock: under the virtual one computing on the loop is how it has to be.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from functools import cache
from threading import get_ident

import trio

LIMIT_S = 0.25  # 250 times the rule of the house: generous, because machines that run tests are shared
_THREAD = getattr(resource, "RUSAGE_THREAD", None)  # Linux only


_excused_s = 0.0  # wall time of all `excused` blocks


@contextlib.contextmanager
def excused() -> Iterator[None]:
    """Leave a block of a test's own out of account, such as the start of a process.

    That waits until the child runs its program, and a child that gets no processor is no fault of the loop.
    """
    global _excused_s
    began_s = time.perf_counter()
    try:
        yield
    finally:
        _excused_s += time.perf_counter() - began_s


class LoopWatchdog(trio.abc.Instrument):
    """A trio instrument; `worst_s` and `worst_task` tell the longest step so far."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.worst_task = ""
        self._wall_s = math.inf  # no step seen to begin yet
        self._usage = (0.0, 0.0, 0, 0)

    def before_run(self) -> None:
        gc.freeze()

    def after_run(self) -> None:
        gc.unfreeze()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._usage = _usage()
        self._wall_s = time.perf_counter() - _excused_s

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        took_s = time.perf_counter() - _excused_s - self._wall_s
        if took_s <= LIMIT_S:
            return
        spent = [after - before for after, before in zip(_usage(), self._usage, strict=True)]
        cpu_s, starved_s, waits, preempted = spent
        blocked_s = took_s - starved_s if waits > preempted else cpu_s
        if blocked_s > self.worst_s:
            self.worst_s, self.worst_task = blocked_s, task.name

    def complaint(self) -> str | None:
        """Complaint to the author of the test, if there is one."""
        if self.worst_s <= LIMIT_S:
            return None
        return (
            f"task {self.worst_task} kept the trio loop busy for {self.worst_s:.2f} s without a checkpoint "
            f"(limit {LIMIT_S} s): move the work to a Worker, or mark the test no_watchdog(reason)"
        )


def _usage() -> tuple[float, float, int, int]:
    """Processor seconds, seconds of waiting for a processor, voluntary and involuntary switches of this thread."""
    if _THREAD is None or sys.platform != "linux":
        return time.thread_time(), 0.0, 0, 0
    usage = resource.getrusage(_THREAD)
    starved_ns = int(os.pread(_schedstat(get_ident()), 100, 0).split()[1])
    return usage.ru_utime + usage.ru_stime, starved_ns / 1e9, usage.ru_nvcsw, usage.ru_nivcsw


@cache
def _schedstat(_: int) -> int:
    """The kernel's account of the calling thread's waiting, kept open: it is read at every step."""
    return os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
