"""The Worker contract: where anything that takes longer than a millisecond runs.

Services and roles are given a worker; real ones use a thread, the simulator's computes at once and then lets
the virtual cost pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Worker(Protocol):
    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        """Run `job` off the loop, first come first served; `cost_s` is what the simulator charges.

        `urgent` jobs, of which others wait, go before those that are not and have not been started. A job that was
        started runs to its end even when the caller is cancelled.
        """
        ...
