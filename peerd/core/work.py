"""The Worker interface, which runs every job that takes longer than a millisecond.

Services and roles receive a worker. The real one uses a thread; the simulator's runs the job at once and then advances
virtual time by its cost. A job that reads from the network itself uses a `RateLimitedRead`, which shares the download
limit with the daemon's other traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

# A rate-limited read in a thread: (read, most) waits for its turn, then returns read(n) for an allowed n <= most.
RateLimitedRead = Callable[[Callable[[int], bytes], int], bytes]


def read_at_once(read: Callable[[int], bytes], most: int) -> bytes:
    """A `RateLimitedRead` without a limit: reads up to `most` bytes at once."""
    return read(most)


class Worker(Protocol):
    """Runs jobs outside the event loop."""

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        """Run `job` outside the event loop and return its result. Jobs run in the order of the calls.

        `urgent` jobs, which other peers wait for, run before queued jobs that are not urgent. A job that has started
        runs to its end even if the caller is cancelled. `cost_s`: the duration in the simulator, in seconds.
        """
        ...
