"""Timer of a sans-IO machine: sleeps until the instant the machine names, wakes it, and asks again.

The machine is not called from two places at once: all runs in trio's one thread, `wake` without a break. An instant
that has become later is not looked up: the machine is woken at the old one, finds nothing to do, and names the new.
"""

from __future__ import annotations

from collections.abc import Callable

import trio


class Timer:
    """Calls `wake()` at each instant of trio's clock that `wake_at()` names; infinity: not before `rearm`."""

    def __init__(self, wake_at: Callable[[], float], wake: Callable[[], object]) -> None:
        self._wake_at, self._wake = wake_at, wake
        self._sleep = trio.CancelScope()

    def rearm(self) -> None:
        """`wake_at` may name an earlier instant than before: the machine was told of something."""
        self._sleep.deadline = min(self._sleep.deadline, self._wake_at())

    async def run(self) -> None:
        """Keep time until cancelled."""
        while True:
            with trio.CancelScope(deadline=self._wake_at()) as self._sleep:
                await trio.sleep_forever()
            self._wake()
