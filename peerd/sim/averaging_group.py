"""One group's round in simulated averaging: the conductor's `GroupRound`, and `allreduce.Round` at the members.

Messages may overtake one another, so members keep versions that come before the start, and remember what was called
off. Invariant, checked at every commit: whoever commits has the same bits as the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from peerd.core.errors import LocalError
from peerd.machine.allreduce import Part, Round, cut
from peerd.sim.averaging_conductor import CallOff, Commit, GroupRound, Keep, Output, RoundTimes, Start
from peerd.sim.averaging_grid import Cell, Line

Vector = np.ndarray[Any, np.dtype[np.float64]]

_PART_ELEMENTS = 16
_LOOK_S = 0.05  # how often members look for somebody late


@dataclass(slots=True)
class SimPeer:
    """One peer with its pairs (w x, w), one for each cell that it plays; away when not `up`."""

    name: str
    cells: dict[Cell, Vector]
    up: bool = True

    @property
    def pair(self) -> Vector:
        """All that it holds: elements of w x, then w."""
        return np.asarray(np.sum([pair for _, pair in sorted(self.cells.items())], axis=0))


class Net(Protocol):
    """What a group needs of the simulation."""

    now: float

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action()` at that instant, in this round."""
        ...

    def post(self, source: str | None, target: str | None, action: Callable[[], None]) -> None:
        """A message: `action()` when it arrives, if it does. None is a conductor."""
        ...

    def note(self, *what: object) -> None:
        """Put a decision into the trace."""
        ...


@dataclass(slots=True)
class _Attempt:
    """A member's part in one attempt. `sums` fills with its own sums and the other owners' answers."""

    number: int
    group: tuple[str, ...]
    round: Round
    sums: Vector
    versions: dict[int, dict[str, Vector]] = field(default_factory=dict)
    ready: bool = False


class SimGroup:
    """A line of the grid in one round. `decided`: who has ended, and whether it committed."""

    def __init__(self, net: Net, line: Line, peers: dict[str, SimPeer], times: RoundTimes) -> None:
        self.line = line
        self.conductor = GroupRound(line.peers, times)
        self.decided: dict[str, bool] = {}
        self.mean: Vector | None = None  # once somebody has committed
        self.summed: tuple[str, ...] = ()  # whose pairs are in it
        self._net, self._times = net, times
        self._peers = {name: peers[name] for name in line.peers}
        self._cells = dict(zip(line.peers, line.cells, strict=True))
        self._members: dict[str, _Attempt] = {}
        self._early: dict[tuple[str, int], list[Callable[[], None]]] = {}
        self._given_up: dict[str, int] = {}  # the newest attempt that a member will hear no more of
        self._wakes_at = float("inf")

    def begin(self) -> None:
        """The round starts now."""
        self._obey(self.conductor.begin(self._net.now))

    def vanished(self, name: str, seen: bool) -> bool:
        """A member is gone, `seen` by the conductor or not. Returns whether it had still to decide."""
        if name not in self._peers or name in self.decided:
            return False
        if seen:
            self._net.post(None, None, lambda: self._obey(self.conductor.gone(self._net.now, name)))
        return True

    def deadline(self) -> None:
        """Whoever has heard nothing keeps its own."""
        for name, peer in self._peers.items():
            if peer.up:
                self.decided.setdefault(name, False)

    @property
    def over(self) -> bool:
        """Has everyone decided who is still there?"""
        return all(name in self.decided or not peer.up for name, peer in self._peers.items())

    @property
    def committed(self) -> tuple[str, ...]:
        return tuple(name for name in self.line.peers if self.decided.get(name))

    def own(self, name: str) -> Vector:
        """A member's pair in this line."""
        return self._peers[name].cells[self._cells[name]]

    def explained(self) -> Vector | float:
        """What the commit added to the sum of all pairs, because somebody is in it who did not take it."""
        if self.mean is None:
            return 0.0
        left = [name for name in self.summed if not self.decided.get(name)]
        return np.asarray(sum((self.own(name) - self.mean for name in left), np.zeros_like(self.mean)))

    # --- the conductor -----------------------------------------------------------------------------------------

    def _obey(self, outputs: list[Output]) -> None:
        for output in outputs:
            self._net.note(output)
            for name in output.group:
                self._net.post(None, name, partial(self._hear, name, output))
        due = self.conductor.wake_at()
        if due < self._wakes_at:
            self._wakes_at = due
            self._net.at(due, partial(self._wake, due))

    def _wake(self, due: float) -> None:
        if self._wakes_at == due:
            self._wakes_at = float("inf")
            self._obey(self.conductor.wake(self._net.now))

    def _report(self, name: str, number: int, ok: bool, lost: tuple[str, ...] = ()) -> None:
        def arrive() -> None:
            self._obey(self.conductor.report(self._net.now, name, number, ok, lost))

        self._net.post(name, None, arrive)

    # --- a member ----------------------------------------------------------------------------------------------

    def _hear(self, name: str, word: Output) -> None:
        member = self._members.get(name)
        number = member.number if member is not None else -1
        match word:
            case Start(attempt, group) if attempt > max(number, self._given_up.get(name, -1)):
                self._start(name, attempt, group)
            case CallOff(attempt) if attempt >= max(number, self._given_up.get(name, -1) + 1):
                if member is None or number < attempt or not member.ready:
                    self._report(name, attempt, ok=False)
                self._give_up(name, attempt)
            case Commit(attempt) if member is not None and number == attempt and member.ready:
                self._commit(name, member)
            case Keep():
                self.decided[name] = False

    def _give_up(self, name: str, number: int) -> None:
        self._given_up[name] = number
        self._members.pop(name, None)

    def _start(self, name: str, number: int, group: tuple[str, ...]) -> None:
        source = self.own(name)
        parts = cut(len(source), group, _PART_ELEMENTS)
        round_ = Round(name, group, parts, self._times.patience_s)
        member = self._members[name] = _Attempt(number, group, round_, np.empty_like(source))
        round_.begin(self._net.now)
        for part in parts:
            arrive = partial(self._arrive, part, name, number, source[part.begin : part.end])
            if part.owner == name:
                arrive()
            else:
                round_.asked(part.index)
                self._net.post(name, part.owner, arrive)
        for early in self._early.pop((name, number), []):
            early()
        self._net.at(self._net.now + _LOOK_S, partial(self._look, name, member))

    def _arrive(self, part: Part, sender: str, number: int, version: Vector) -> None:
        """A version of a part, at the part's owner."""
        member = self._members.get(part.owner)
        if member is None or member.number < number:
            again = partial(self._arrive, part, sender, number, version)
            self._early.setdefault((part.owner, number), []).append(again)
            return
        if member.number > number:
            return
        versions = member.versions.setdefault(part.index, {})
        versions[sender] = version
        if member.round.arrived(self._net.now, part.index, sender):
            total = versions[member.group[0]].copy()
            for other in member.group[1:]:
                total += versions[other]
            member.sums[part.begin : part.end] = total
            for other in member.group:
                if other != part.owner:
                    self._net.post(part.owner, other, partial(self._returned, part, other, number, total))
        self._check(part.owner, member)

    def _returned(self, part: Part, name: str, number: int, total: Vector) -> None:
        """The sum of a part, at a member."""
        member = self._members.get(name)
        if member is not None and member.number == number:
            member.round.returned(self._net.now, part.index)
            member.sums[part.begin : part.end] = total
            self._check(name, member)

    def _check(self, name: str, member: _Attempt) -> None:
        if member.round.finished and not member.ready:
            member.ready = True
            self._report(name, member.number, ok=True)

    def _look(self, name: str, member: _Attempt) -> None:
        if self._members.get(name) is not member or member.ready or not self._peers[name].up:
            return
        late = member.round.late(self._net.now)
        if late:
            self._report(name, member.number, ok=False, lost=late)
            self._give_up(name, member.number)
        else:
            self._net.at(self._net.now + _LOOK_S, partial(self._look, name, member))

    def _commit(self, name: str, member: _Attempt) -> None:
        mean = member.sums / len(member.group)
        if self.mean is not None and not np.array_equal(mean, self.mean):
            raise LocalError("members of one group commit different values")
        self.mean, self.summed, self.decided[name] = mean, member.group, True
        self._peers[name].cells[self._cells[name]] = mean
        self._net.note("commit", name, hashlib.blake2b(mean.tobytes(), digest_size=8).hexdigest())
