"""One worker per device for all roles of a daemon, started with its first job, within the user's limits.

Torch is imported only then, in a thread. So peers without computing roles never load it, and the others stay responsive
during the import.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import trio

from peerd.core.work import Worker
from peerd.run.runfile import LimitsSection

T = TypeVar("T")


class Devices:
    """The workers of a daemon, by device. An async context manager that closes them on exit."""

    def __init__(self, limits: LimitsSection | None = None) -> None:
        self._limits = limits or LimitsSection()
        self._pace: Any = None  # a model.worker.CpuPace, once torch is imported
        self._open: dict[str, Worker] = {}
        self._lock = trio.Lock()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Devices:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def worker(self, device: str) -> Worker:
        """The worker of a device. It starts with its first job."""
        return _LazyWorker(self, device)

    async def _get(self, device: str) -> Worker:
        async with self._lock:
            if device not in self._open:
                module = await trio.to_thread.run_sync(importlib.import_module, "peerd.model.worker")
                worker = await trio.to_thread.run_sync(self._bounded, module, device)
                self._open[device] = await self._stack.enter_async_context(worker)
            return self._open[device]

    def _bounded(self, module: Any, device: str) -> Any:
        """Create a worker within the limits on threads and memory."""
        threads = self._limits.threads
        module.bound(device, threads, int(self._limits.memory_gb * 1e9))
        if threads and self._pace is None and threads < (os.cpu_count() or 1):
            self._pace = module.CpuPace(threads)
        return module.DeviceWorker(device, threads=threads or None, pace=self._pace)


@dataclass(frozen=True, slots=True)
class _LazyWorker:
    devices: Devices
    device: str

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        worker = await self.devices._get(self.device)
        return await worker.run(job, name=name, cost_s=cost_s, urgent=urgent)
