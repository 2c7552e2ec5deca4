"""A volunteer's hours: whether this peer takes part now, by its machine's local time.

The local time is read once a minute, so a changed clock or time zone, or a suspended machine, is noticed within a
minute. The clock correction that peers agree on is not applied, because users' hours follow their own clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import trio

from peerd.core.clock import Clock, Hours, clock_text, uncorrected

_MINUTE_S: Final = 60.0


def local_minute(unix_s: float) -> int:
    """Minute of the day, in this machine's time zone."""
    shown = time.localtime(unix_s)
    return 60 * shown.tm_hour + shown.tm_min


class OpenHours:
    """The hours of `limits.hours`; always open if `text` is empty. `minute_of` returns the minute of the day."""

    def __init__(self, text: str, clock: Clock, minute_of: Callable[[float], int] = local_minute) -> None:
        self.text = text
        self._hours = Hours.parse(text) if text else None
        self._clock, self._minute_of = clock, minute_of

    @property
    def open(self) -> bool:
        """True if this peer takes part now."""
        return self._hours is None or self._hours.open_at(self._minute)

    @property
    def opens(self) -> str:
        """The time of day at which it next takes part, such as 22:00; the current time if it takes part now."""
        minute = self._minute
        return clock_text(minute if self._hours is None or self.open else self._hours.opens_next(minute))

    async def closed(self) -> None:
        """Wait until the hours end, or forever if no hours are set."""
        if self._hours is None:
            await trio.sleep_forever()
        while self.open:
            await self._next_minute()

    async def opened(self) -> None:
        """Wait until the hours begin."""
        while not self.open:
            await self._next_minute()

    @property
    def _minute(self) -> int:
        return self._minute_of(uncorrected(self._clock))

    async def _next_minute(self) -> None:
        await trio.sleep(_MINUTE_S - uncorrected(self._clock) % _MINUTE_S)
