"""One worker per device for all roles of a daemon, opened when the first job comes.

Only then is torch imported, in a thread, so that a peer without computing roles never loads it and one with them
keeps answering meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import trio

from peerd.core.work import Worker

T = TypeVar("T")


class Devices:
    """The workers; an async context manager whose end closes them."""

    def __init__(self) -> None:
        self._open: dict[str, Worker] = {}
        self._lock = trio.Lock()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Devices:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def worker(self, device: str) -> Worker:
        """The worker of this device; nothing starts before its first job."""
        return _LazyWorker(self, device)

    async def _get(self, device: str) -> Worker:
        async with self._lock:
            if device not in self._open:
                module = await trio.to_thread.run_sync(importlib.import_module, "peerd.compute.worker")
                self._open[device] = await self._stack.enter_async_context(module.DeviceWorker(device))
            return self._open[device]


@dataclass(frozen=True, slots=True)
class _LazyWorker:
    devices: Devices
    device: str

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        worker = await self.devices._get(self.device)
        return await worker.run(job, name=name, cost_s=cost_s, urgent=urgent)
