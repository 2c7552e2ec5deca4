"""What a step waits for when nothing has moved for a while: whose microbatches, who has not averaged, who not stepped.

For people: it changes nothing. A step may take long because work takes long; then it says whose work that is. The
text names no times, so that it stays the same while the same is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from peerd.machine.conductor.conductor import Conductor
from peerd.machine.conductor.phases import Phase

_PATIENCE_S: Final = 10.0
_NAMED: Final = 4  # of those who are waited for; the others are counted


class Standstill:
    """One conductor's term."""

    def __init__(self) -> None:
        self._view: object = None
        self._since = 0.0

    def look(self, now: float, conductor: Conductor) -> str:
        """What is waited for; "" while things move, or where `Conductor.waits_for` tells why they do not."""
        due = conductor.batches.due
        view = conductor.current, conductor.phase, len(due.entries), len(due.undone), *map(len, due.missing)
        if view != self._view:
            self._view, self._since = view, now
        if now - self._since < _PATIENCE_S:
            return ""
        awaited = sorted(conductor.awaited())
        if conductor.phase is Phase.MOVING:
            return f"{named(awaited)} to make the step" if awaited else ""
        if conductor.phase is Phase.CLOSING:
            return f"{named(awaited)} to average" if awaited else "another attempt to average"
        begun = due.begun()
        if conductor.phase is not Phase.OPEN:
            return ""
        if begun:
            return f"{sum(count for count, _ in begun.values())} microbatches that {named(sorted(begun))} began"
        return f"trainers to begin microbatches: {len(due.entries)} of {due.capacity} are there"


def named(peers: Iterable[str]) -> str:
    """The first few by the end of their names, and how many others there are."""
    names = [f"…{peer[-8:]}" for peer in peers]
    more = [f"{len(names) - _NAMED} others"] if len(names) > _NAMED else []
    return " and ".join(filter(None, [", ".join(names[:_NAMED]), *more]))
