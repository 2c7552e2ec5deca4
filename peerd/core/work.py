"""The Worker contract: where anything that takes longer than a millisecond runs.

Services and roles are given a worker; real ones use a thread, the simulator's computes at once and then lets
the virtual cost pass. What a job reads from the network itself takes turns with the daemon's other traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

# Reads from the network in a thread: calls its first argument with how many bytes it may bring, at most the second.
ReadInTurn = Callable[[Callable[[int], bytes], int], bytes]


def read_at_once(read: Callable[[int], bytes], most: int) -> bytes:
    """A ReadInTurn where nothing is limited."""
    return read(most)


class Worker(Protocol):
    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        """Run `job` off the loop, first come first served; `cost_s` is what the simulator charges.

        `urgent` jobs, of which others wait, go before those that are not and have not been started. A job that was
        started runs to its end even when the caller is cancelled.
        """
        ...
