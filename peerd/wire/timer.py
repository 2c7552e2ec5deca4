"""Timer of a sans-IO state machine: sleeps until the machine's next deadline, wakes it, and repeats.

The machine is never called concurrently: everything runs in trio's thread, and `wake` does not yield. If a deadline
moves to a later time, the timer still fires at the old one; the machine then has nothing to do and returns the new one.
"""

from __future__ import annotations

from collections.abc import Callable

import trio


class Timer:
    """Calls `wake()` at the time that `wake_at()` returns, by trio's clock. Infinity: not before `rearm`."""

    def __init__(self, wake_at: Callable[[], float], wake: Callable[[], object]) -> None:
        self._wake_at, self._wake = wake_at, wake
        self._sleep = trio.CancelScope()

    def rearm(self) -> None:
        """Read `wake_at` again, since it may return an earlier time than before."""
        self._sleep.deadline = min(self._sleep.deadline, self._wake_at())

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with trio.CancelScope(deadline=self._wake_at()) as self._sleep:
                await trio.sleep_forever()
            self._wake()
