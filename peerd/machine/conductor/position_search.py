"""Search for the position that a swarm goes on from: when enough has been heard, and what follows from it.

A new conductor gathers members (`Gathering`) and then takes the newest position that every stage can reach
(`recovery`). Later the same is looked for when a stage has long lost the current state, and when members turn out to be
further than the conductor knew. Of a step that is only heard of, in a record, it is believed for a while that somebody
has it; of a keeper that can be reached, always. Decides only; the roster and the course are the conductor's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from peerd.core.messages.swarm import Position
from peerd.machine.conductor.gathering import Gathering
from peerd.machine.conductor.phases import Course, Phase
from peerd.machine.conductor.recovery import Established, Knowledge, agreeing_on, best_position, furthest
from peerd.machine.swarm.events import ConductorConfig, Origin, SendMove
from peerd.machine.swarm.roster import START, Roster


class PositionSearch:
    """See the module's header. Times are arguments, in seconds."""

    def __init__(self, config: ConductorConfig, origin: Origin, roster: Roster, course: Course, now: float) -> None:
        self._config, self._own = config, origin.own
        self._roster, self._course = roster, course
        self._gathering = Gathering(config, now)
        self._believes_hearsay = True
        self._broken_since: float | None = None  # since when a stage has no member with the current state
        self.established = Established(origin.own, origin.established)
        self.announced_step = 0  # the newest step that anyone out of reach is said to be at: counts for a while
        self.kept_step = 0  # the newest that somebody keeps who can be reached
        self.lost = False  # every stage has members, and they cannot go on with what they have

    # --- what is heard ----------------------------------------------------------------------------------------

    def expect(self, peers: Iterable[str]) -> None:
        """Members that are said to live: nothing is decided at once without them."""
        self._gathering.expect(peers)

    def unexpect(self, peer: str) -> None:
        """This one cannot be reached."""
        self._gathering.unexpect(peer)

    def heard(self, now: float, peer: str) -> None:
        """The peer has said hello while members are gathered."""
        self._gathering.heard(now, peer)

    def begin(self, now: float) -> None:
        """Members are gathered once more."""
        self._broken_since = None
        self._gathering.begin(now)

    def arrived(self) -> None:
        """All stand at one position: no stage lacks it."""
        self._broken_since = None

    def look(self, now: float) -> None:
        """Time passed: hearsay grows old."""
        self._believes_hearsay = self._gathering.believes_hearsay(now)

    # --- what follows -----------------------------------------------------------------------------------------

    def best(self) -> Position | None:
        """The newest position that every stage can reach, as far as it is backed; None: there is none."""
        announced = max(self.announced_step if self._believes_hearsay else 0, self.kept_step)
        config = self._config
        knowledge = Knowledge(config.stages, config.first_save, self.established, self.known, announced)
        return best_position(knowledge, self._roster.entries)

    @property
    def known(self) -> Position | None:
        """Where the swarm stands, as far as the conductor knows itself: by its own peer, when it is new."""
        own = self._roster.entries.get(self._own)
        return self._course.target or self._course.current or (own.position if own is not None else None)

    def is_ahead(self, peer: str) -> bool:
        """Says the member that it is further than the conductor knew, and has it enough others behind it?"""
        known, position = self.known, self._roster.entries[peer].position
        return known is not None and position.step > known.step and self.best() == position

    def is_over(self, now: float) -> bool:
        """Have members been gathered for long enough?"""
        return self._gathering.over(now, self._roster.entries)

    def decide(self, now: float) -> Position | None:
        """The position to go on from, at the end of gathering; None: there is none, or members are gathered anew."""
        target = self.best()
        return None if self._gathering.begins_anew(now, target is not None) else target

    def moves(self, target: Position) -> list[SendMove]:
        """What members have to do to stand at `target`: commit what they have prepared, or restore what they saved."""
        stages, members = range(self._config.stages), self._roster.entries
        agreeing = set[str]().union(*(agreeing_on(stage, target, members) for stage in stages))
        orders = list[SendMove]()
        for peer, member in sorted(members.items()):
            commit = target == member.prepared and peer in agreeing
            if member.position != target and (commit or target in (START, *member.saved)):
                orders.append(SendMove(peer, target, commit=commit))
        return orders

    def falls_back(self, now: float) -> bool:
        """Is it time to look for an older position, since a stage has long been without the current one?"""
        if not self._roster.lagging_stages(self._course.current):
            self._broken_since = None
        elif self._broken_since is None:
            self._broken_since = now
        else:
            return self._is_broken(now) and self.best() is not None
        return False

    def look_lost(self, now: float) -> bool:
        """Judge whether nothing here leads on (`lost`); True when that has changed."""
        waits = self._is_broken(now) or (self._course.phase is Phase.GATHERING and self.is_over(now))
        before = self.lost
        self.lost = waits and not self._roster.empty_stages() and self.best() is None
        return self.lost != before

    def _is_broken(self, now: float) -> bool:
        return self._broken_since is not None and now - self._broken_since >= self._config.broken_s

    def due(self, now: float) -> float:
        """When time alone decides something; infinite where it does not."""
        due = math.inf
        if self._course.phase is Phase.GATHERING and self._gathering.due > now:
            due = self._gathering.due
        if self._broken_since is not None and (decided := self._broken_since + self._config.broken_s) > now:
            due = min(due, decided)
        return due

    def problem(self) -> str:
        """Why the members that are gathered do not go on yet."""
        if self.best() is not None:
            return "the conductor gathers the members"
        ahead = furthest(self._roster.entries)
        told = f"; peer …{ahead[0][-8:]} says that it has step {ahead[1]}" if ahead else ""
        return f"no position that every stage can reach: a peer or a checkpoint with newer state is missing{told}"
