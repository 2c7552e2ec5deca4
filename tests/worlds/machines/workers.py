"""A worker without torch for tests of services: computes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


class InlineWorker:
    """Implements `core.work.Worker`."""

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        await trio.lowlevel.checkpoint()
        return job()
