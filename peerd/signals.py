"""Broadcast signal: wakes every task that waits at the moment, as often as it is given.

What trio has no name for: an Event that is set and at once replaced by a new one. It is not remembered: whoever waits
afterwards waits for the next one, so look at what it stands for first, as with a condition:

    while not ready():
        await signal.wait()
"""

from __future__ import annotations

import trio


class Signal:
    """Given with `notify`, awaited with `wait`."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event = trio.Event()

    def notify(self) -> None:
        """Wake all who wait now."""
        self._event.set()
        self._event = trio.Event()

    @property
    def awaited(self) -> bool:
        """True while a task waits."""
        return self._event.statistics().tasks_waiting > 0

    async def wait(self) -> None:
        """Until the next `notify`."""
        await self._event.wait()
