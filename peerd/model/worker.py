"""Workers for computing: one thread per device, so that the trio loop never computes.

Invariants: jobs run one at a time, urgent ones first, otherwise in the order of submission. A started job runs to its
end even if its caller is cancelled (its result is dropped); a job whose caller is cancelled before it starts is
skipped. The caller receives a job's exception, which is NoMemory if torch ran out of memory. A job on a GPU ends when
the GPU has finished it.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, TypeVar

import outcome
import torch
import trio

from peerd.codec import gpu
from peerd.core.errors import LocalError, NoMemory
from peerd.model.allocator import return_large_blocks

T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 10.0  # for the running job when its worker closes; slightly longer than the daemon's drain

BURST_S: Final = 0.1  # per processor: credit of a job after an idle period


def use_threads(count: int) -> None:
    """Let torch use `count` threads in the calling thread, since several peerd processes may share one machine."""
    torch.set_num_threads(max(1, count))


def bound(device: str, threads: int, memory_bytes: int) -> None:
    """Limit torch's threads and GPU memory in this process; 0: no limit. Call it before torch computes anything."""
    return_large_blocks()
    if threads:
        use_threads(threads)
        with contextlib.suppress(RuntimeError):  # torch has already computed in this process
            torch.set_num_interop_threads(threads)
    if memory_bytes and device.startswith("cuda"):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, memory_bytes / total), device)


@dataclass(slots=True, eq=False)
class _Ticket:
    """One job submitted to the worker's thread."""

    job: Callable[[], Any]
    name: str
    done: trio.Event = field(default_factory=trio.Event)
    wanted: bool = True
    result: outcome.Outcome[Any] | None = None


_Place = tuple[int, int, _Ticket | None]  # in the queue: urgency, number and job; None closes the worker
_URGENT, _ORDINARY, _LAST = range(3)


class DeviceWorker:
    """A `peerd.core.work.Worker` with a thread of its own; use it as an async context manager.

    `threads`: number of threads that torch may use inside a job; None keeps torch's default. `pace`: delays the start
    of jobs.
    """

    def __init__(self, device: str = "cpu", *, threads: int | None = None, pace: CpuPace | None = None) -> None:
        self.device = device
        self.busy_s = 0.0  # time spent in jobs so far
        self.jobs_done = 0
        self._threads, self._pace = threads, pace
        self._tickets: queue.PriorityQueue[_Place] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._waiting: dict[_Ticket, None] = {}
        self._current = ""
        self._token: trio.lowlevel.TrioToken | None = None
        self._stopped = trio.Event()

    async def __aenter__(self) -> DeviceWorker:
        self._token = token = trio.lowlevel.current_trio_token()
        threading.Thread(target=self._work, args=(token,), name=f"peerd {self.device}", daemon=True).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Fail the jobs that have not started, and wait up to `CLOSE_TIMEOUT_S` for the running one."""
        self._token = None
        for ticket in self._waiting:
            ticket.wanted = False
        self._tickets.put((_LAST, next(self._numbers), None))
        with trio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await self._stopped.wait()
        for ticket in self._waiting:
            ticket.done.set()

    @property
    def queued(self) -> int:
        """Number of submitted jobs that have not finished, including the running one."""
        return len(self._waiting)

    @property
    def current(self) -> str:
        """Name of the running job; empty if idle."""
        return self._current

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        """Run `job` in the device's thread; `cost_s` is for the simulator and unused here."""
        if self._token is None:
            raise LocalError(f"the worker of {self.device} is not open: cannot run {name}")
        ticket = _Ticket(job, name)
        self._waiting[ticket] = None
        self._tickets.put((_URGENT if urgent else _ORDINARY, next(self._numbers), ticket))
        try:
            await ticket.done.wait()
        finally:
            ticket.wanted = False
            self._waiting.pop(ticket, None)
        if ticket.result is None:
            raise LocalError(f"the worker of {self.device} closed before {name} could run")
        result: T = ticket.result.unwrap()
        return result

    def _work(self, token: trio.lowlevel.TrioToken) -> None:
        """Body of the thread: runs one ticket after another, until it receives None instead of a ticket."""
        if self._threads is not None:
            use_threads(self._threads)
        with contextlib.suppress(RuntimeError):  # a faulty GPU fails the jobs that use it
            gpu.wake(self.device)
        while (ticket := self._tickets.get()[2]) is not None:
            if ticket.wanted and self._pace is not None:
                self._pace.rest()
            if ticket.wanted:
                self._current = ticket.name
                started = time.perf_counter()
                ticket.result = outcome.capture(_within_memory, lambda job=ticket.job: self._whole(job), ticket.name)
                self.busy_s += time.perf_counter() - started
                self.jobs_done += 1
                self._current = ""
            self._set(token, ticket.done)
            del ticket  # it holds tensors, which must not outlive the job while the thread waits for the next one
        self._set(token, self._stopped)

    def _whole(self, job: Callable[[], T]) -> T:
        result = job()
        gpu.settle(self.device)
        return result

    @staticmethod
    def _set(token: trio.lowlevel.TrioToken, event: trio.Event) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # the loop has ended, and all waiters with it
            token.run_sync_soon(event.set)


def _within_memory(job: Callable[[], T], name: str) -> T:
    try:
        return job()
    except (RuntimeError, MemoryError) as error:
        if not gpu.lacks_memory(error):
            raise
        reason = (str(error) or "this machine is out of memory").splitlines()[0]
        raise NoMemory(f"there is no memory for the job “{name}”: {reason}") from None


class CpuPace:
    """Limits a process's processor time: over a second or longer, it uses at most `threads` processors.

    Measures the whole process, including its trio loop and encryption, and makes computing jobs wait for any excess
    before they start, never while they run. Unused time is not saved up. One instance for all workers of a process;
    called in their threads.
    """

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
