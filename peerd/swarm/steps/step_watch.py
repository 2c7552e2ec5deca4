"""What is known of the step that is being made: when it will be made (`StepEta`), and what a stalled one waits for
(`Standstill`). Both read the conductor's views and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from peerd.core.limits import FORESEEABLE_S
from peerd.messages.swarm import Forecast
from peerd.swarm.positions.phases import Phase
from peerd.swarm.posts import peer_of
from peerd.swarm.steps.conductor import Conductor

_KEPT_S = 0.2
_SMOOTHING = 0.3

_PATIENCE_S: Final = 10.0
_NAMED: Final = 4  # peers that are named; the others are counted


class StepEta:
    """Forecast of a step, shared by all peers that ask: when the batch is complete, and when the step is made.

    The time between the two, for averaging and stepping, is estimated from the last steps. A forecast scans the whole
    batch, so it is cached for a moment and counted down. One for each conductor's term.
    """

    def __init__(self) -> None:
        self._made, self._view = -math.inf, (-1, Phase.GATHERING)
        self._whole_in_s: float | None = None
        self._closing_since: float | None = None
        self._closing_step = 0
        self._closing_s: float | None = None  # smoothed seconds from the complete batch to the next step, if known

    def look(self, now: float, conductor: Conductor) -> Forecast | None:
        """Forecast as of `now`, or None if it is unknown."""
        view = conductor.members_version, conductor.phase
        if view != self._view or now - self._made >= _KEPT_S:
            self._watch_closing(now, conductor)
            self._made, self._view, self._whole_in_s = now, view, conductor.whole_in_s(now)
        if self._whole_in_s is None:
            return None
        whole_in_s = max(0.0, self._whole_in_s - (now - self._made))
        closing_s = self._closing_s or 0.0
        if self._closing_since is not None:
            closing_s = max(0.0, closing_s - (now - self._closing_since))
        return Forecast(whole_in_s, min(whole_in_s + closing_s, FORESEEABLE_S))

    def _watch_closing(self, now: float, conductor: Conductor) -> None:
        """Measure the smoothed time from the complete batch to the step. Callers ask at every change of phase."""
        step = conductor.current.step if conductor.current is not None else 0
        match conductor.phase:
            case Phase.CLOSING:
                if self._closing_since is None:
                    self._closing_since, self._closing_step = now, step
            case Phase.MOVING:
                pass
            case _:
                if self._closing_since is not None and step == self._closing_step + 1:
                    took = now - self._closing_since
                    known = took if self._closing_s is None else self._closing_s
                    self._closing_s = known + (took - known) * _SMOOTHING
                self._closing_since = None


class Standstill:
    """Text on what a stalled step waits for: trainers' microbatches, or members that have not averaged or stepped yet.

    For logs and users; it has no effect on the run. A step may take long because the work takes long; then the text
    names the peers that do the work. It contains no times, so that it stays the same while the cause stays the same.
    """

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
