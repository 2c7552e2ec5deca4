"""Reports that wait for news, each until its own deadline.

Nearly every microbatch has a report that waits, and a timer for each report was a tenth of its cost. So the deadlines
of all waits are checked together, at most twice a second, when the first is due. A wait may last up to 0.5 s longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import trio

LOOK_S: Final = 0.5


class WaitingReports:
    """Waiting reports, grouped by senders that need the same news.

    Calls `sooner` if the time of the next check, `look_at`, becomes earlier.
    """

    def __init__(self, sooner: Callable[[], None]) -> None:
        self._sooner = sooner
        self._waiting: dict[str, dict[trio.Event, float]] = {}  # group -> its waits and their deadlines
        self.look_at, self._looked_at = math.inf, -math.inf

    @property
    def idle(self) -> bool:
        """True while no report waits."""
        return not self._waiting

    async def wait(self, group: str, until: float) -> None:
        """Let a report of this group wait for news, until the time `until` at most."""
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
        """Wake the reports of this group."""
        for event in self._waiting.pop(group, ()):
            event.set()

    def news_but_for(self, but: str) -> None:
        """Wake the reports of all groups except this one."""
        for group in [group for group in self._waiting if group != but]:
            self.news(group)

    def end(self, now: float) -> None:
        """Wake the reports whose deadline has passed. Call it when `look_at` is due."""
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
