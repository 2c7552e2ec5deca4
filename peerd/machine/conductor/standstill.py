"""Text on what a stalled step waits for: trainers' microbatches, or members that have not averaged or stepped yet.

For logs and users; it has no effect on the run. A step may take long because the work takes long; then the text names
the peers that do the work. It contains no times, so that it stays the same while the cause stays the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from peerd.machine.conductor.conductor import Conductor
from peerd.machine.positions.phases import Phase
from peerd.machine.swarm.posts import peer_of

_PATIENCE_S: Final = 10.0
_NAMED: Final = 4  # peers that are named; the others are counted


class Standstill:
    """Stall watch for one conductor's term."""

    def __init__(self) -> None:
        self._view: object = None
        self._since = 0.0

    def look(self, now: float, conductor: Conductor) -> str:
        """Text on what the step waits for; "" while it progresses, or if `Conductor.waits_for` gives the reason."""
        due = conductor.batches.due
        view = conductor.current, conductor.phase, len(due.entries), due.undone, *due.missing
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
            count = sum(count for count, _ in begun.values())
            return f"{count} microbatches that {named(sorted(begun))} began{_unproven_stages(conductor)}"
        return f"trainers to begin microbatches: {len(due.entries)} of {due.capacity} are there"


def _unproven_stages(conductor: Conductor) -> str:
    """Text on stages whose members have never helped to make a step while others have: perhaps they do nothing."""
    established, found = conductor.search.established, list[str]()
    for stage in conductor.roster.stages:
        there = conductor.roster.at(stage, conductor.current)
        if there and established.peers and not any(post in established for post in there):
            found.append(
                f"stage {stage} has only {named(map(peer_of, there))}, which has not helped to make a step yet"
            )
    return "".join(f"; {text}" for text in found)


def named(peers: Iterable[str]) -> str:
    """Names of the first few peers (the ends of their ids), and the number of the others."""
    names = [f"…{peer[-8:]}" for peer in peers]
    more = [f"{len(names) - _NAMED} others"] if len(names) > _NAMED else []
    return " and ".join(filter(None, [", ".join(names[:_NAMED]), *more]))
