"""Broadcast signal: each `notify` wakes all tasks that are waiting at that time.

It is like a trio.Event that is set and immediately replaced by a new one. A signal is not stored: a task that waits
later waits for the next one. So check the condition first, as with a condition variable:

    while not ready():
        await signal.wait()
"""

from __future__ import annotations

import trio


class Signal:
    """A broadcast signal: `wait` waits for the next `notify`."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks."""
        self._event.set()
        self._event = trio.Event()

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        await self._event.wait()
