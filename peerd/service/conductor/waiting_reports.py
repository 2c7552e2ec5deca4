"""Reports that wait for news, each for its own time at most.

A report waits with nearly every microbatch, and a timer of its own was a tenth of what it cost: the ends of all waits
are looked at together, twice a second at most, when the first of them is due. So a wait may last LOOK_S longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import trio

LOOK_S: Final = 0.5


class WaitingReports:
    """Waits by group, for those who want the same news. `sooner` is told when `look_at` comes nearer."""

    def __init__(self, sooner: Callable[[], None]) -> None:
        self._sooner = sooner
        self._waiting: dict[str, dict[trio.Event, float]] = {}  # group -> its waits, and when each is over
        self.look_at, self._looked_at = math.inf, -math.inf

    @property
    def idle(self) -> bool:
        """True while nothing waits."""
        return not self._waiting

    async def wait(self, group: str, until: float) -> None:
        """Until the group's news, or until that time is over."""
        event = trio.Event()
        waits = self._waiting.setdefault(group, {})
        waits[event] = until
        self._look_by(max(until, self._looked_at + LOOK_S))
        try:
            await event.wait()
        finally:
            waits.pop(event, None)
            if not waits and self._waiting.get(group) is waits:
                del self._waiting[group]

    def news(self, group: str) -> None:
        """Wake those of this group who wait now."""
        for event in self._waiting.pop(group, ()):
            event.set()

    def news_but_for(self, but: str) -> None:
        """Wake all groups but this one."""
        for group in [group for group in self._waiting if group != but]:
            self.news(group)

    def end(self, now: float) -> None:
        """Wake those whose time is over; call it when `look_at` is due."""
        if now < self.look_at:
            return
        for waits in self._waiting.values():
            for event in [event for event, until in waits.items() if until <= now]:
                event.set()
                del waits[event]
        first = min((until for waits in self._waiting.values() for until in waits.values()), default=math.inf)
        self.look_at, self._looked_at = max(first, now + LOOK_S), now

    def _look_by(self, at: float) -> None:
        if at < self.look_at:
            self.look_at = at
            self._sooner()
