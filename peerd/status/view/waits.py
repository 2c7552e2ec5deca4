"""Logs what the parts of a daemon wait for, once a wait lasts from one check to the next, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping

from peerd.log import EventLog


class WaitLogger:
    """Logs changes in what the parts of a daemon wait for. `look` is called about once a second."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._told: dict[str, str | None] = {}
        self._before: dict[str, str | None] = {}

    def look(self, reasons: Mapping[str, str | None]) -> None:
        """Log what changed. `reasons` has each part's current reason to wait, or None if it does not wait."""
        for part, reason in reasons.items():
            if reason is None and self._told.get(part) is not None:
                self._log.event("clock.agreed" if part == "clock" else "role.unblocked", part=part)
            elif reason is None or self._before.get(part) is None or reason == self._told.get(part):
                continue
            else:
                level = "warning" if part == "network" else "info"
                name = "clock.differs" if part == "clock" else "role.blocked"
                self._log.event(name, level=level, part=part, reason=reason)
            self._told[part] = reason
        self._before = dict(reasons)
