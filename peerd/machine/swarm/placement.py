"""Choice of a stage: for a peer that joins, and for one that idles while another stage has no peer.

`place` deals peers that join at the same moment to the stages, in the order of their arrival, so that two do not fill
one gap; all see the same list. A state of its own is a reason, not a command: it decides between equally needy stages,
and comes first only where nobody else has that stage's state. `VacancyWatch` watches the conductor's list; of the peers
of the best-staffed stages one at a time has its turn to move to a stage that has no peer (`Move`). Decides only: the
evidence that a stage is empty, and that ours can spare us, is the driver's to get. Hostile input: any list, any
arrivals; what they can do is that a peer chooses another stage, and that it moves once in a while, never twice within
MOVE_AGAIN_S, and never from a stage that the list says has no other peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from peerd.core.messages.swarm import MemberInfo

EMPTY_S: Final = 5.0  # a stage is without a peer for so long before one moves there: a newcomer, or its own, may come
TURN_S: Final = 15.0  # for one peer to move; then it is the next one's turn
MOVE_AGAIN_S: Final = 300.0  # a peer that has moved stays at least so long
CHOOSING_S: Final = 15.0  # for a peer that has just come to choose
TAKING_S: Final = 30.0  # for it to build the stage that it has chosen
_SAME: Final = 1.1  # times the least: as needy


@dataclass(frozen=True, slots=True)
class Seat:
    """A post that a living peer holds."""

    peer: str
    stage: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A peer about to serve a stage. `has`: stages that it has a state of, the newest first; `takes`: its choice."""

    since: float
    peer: str
    has: tuple[int, ...] = ()
    takes: int | None = None

    def counts(self, wall: float) -> bool:
        """False when it has taken so long that it will not come."""
        return wall - self.since < (CHOOSING_S if self.takes is None else TAKING_S)


@dataclass(frozen=True, slots=True)
class Need:
    """The need for peers: the posts that there are, the stages whose state somebody has, and the microbatches a second
    that each stage can do (empty: not known, and a stage can do as much as it has peers).
    """

    stages: int
    seats: Sequence[Seat]
    held: Set[int] = frozenset()
    capacity: Sequence[float] = ()


class _Staff:
    """The peers that the stages have, and will have with those that are on their way."""

    def __init__(self, need: Need, seats: Sequence[Seat]) -> None:
        self._stages = range(need.stages)
        self._count = Counter(seat.stage for seat in seats if seat.stage in self._stages)
        self._knows = len(need.capacity) == need.stages and any(need.capacity)
        each = need.capacity if self._knows else [float(self._count[stage]) for stage in self._stages]
        mean = sum(each) / max(1, len(seats)) or 1.0
        self._each = [each[stage] / self._count[stage] if self._count[stage] else mean for stage in self._stages]

    def add(self, stage: int) -> None:
        """One more will serve it, who does as much as its others."""
        self._count[stage] += 1

    def neediest(self, arrival: Arrival) -> tuple[int, str]:
        """The stage that can do least, and the reason; of several one that the peer has a checkpoint of."""
        can = [self._count[stage] * self._each[stage] for stage in self._stages]
        needy = [stage for stage in self._stages if can[stage] <= _SAME * min(can)]
        own = next((stage for stage in arrival.has if stage in needy), None)
        if own is not None and len(needy) > 1:
            return own, "this peer has a checkpoint of it"
        stage = min(needy, key=lambda one: (can[one], one))
        count = self._count[stage]
        if not count:
            return stage, "it has no peer"
        if self._knows:
            return stage, f"it can do {can[stage]:.3g} microbatches a second, and no stage fewer"
        return stage, f"it has {count} peer{'s' * (count > 1)}, and no stage has fewer"


def place(need: Need, arrivals: Iterable[Arrival], own: str) -> tuple[int, str]:
    """The stage for `own`, which is one of the arrivals, and the reason."""
    seats = [seat for seat in need.seats if seat.peer != own]
    serving, staff = {seat.peer for seat in seats}, _Staff(need, seats)
    waiting = list[Arrival]()
    for one in sorted(arrivals, key=lambda arrival: (arrival.since, arrival.peer)):
        if one.takes is None and one.peer not in serving:
            waiting.append(one)
        elif one.takes is not None and 0 <= one.takes < need.stages and Seat(one.peer, one.takes) not in seats:
            staff.add(one.takes)
    chosen = _with_the_only_state(need, waiting)
    for stage, _ in chosen.values():
        staff.add(stage)
    for one in waiting:
        if one.peer not in chosen:
            chosen[one.peer] = staff.neediest(one)
            staff.add(chosen[one.peer][0])
    return chosen.get(own) or staff.neediest(Arrival(0.0, own))


def _with_the_only_state(need: Need, waiting: Sequence[Arrival]) -> dict[str, tuple[int, str]]:
    """The arrivals that have a state which nobody who serves has, each with that stage: one for each stage."""
    chosen: dict[str, tuple[int, str]] = {}
    lacking = set(range(need.stages)) - need.held
    for one in waiting:
        stage = next((stage for stage in one.has if stage in lacking), None)
        if stage is not None:
            lacking.discard(stage)
            chosen[one.peer] = stage, "no other peer has its state"
    return chosen


@dataclass(frozen=True, slots=True)
class Move:
    """This peer's turn to go from one stage to another, which has been empty for `empty_s`. `mates` stay behind."""

    source: int
    target: int
    empty_s: float
    mates: tuple[str, ...]
    ready: frozenset[str]  # those of the mates that have the current state, by the list


class VacancyWatch:
    """The watch of stages without peers, by the list of one conductor; see the module's header."""

    def __init__(self, own: str, stages: int) -> None:
        self._own, self._stages = own, range(stages)
        self._empty_since: dict[int, float] = {}
        self._turns: dict[int, list[str | None]] = {}  # stage -> the peers that had their turn; the last one has it now
        self._stays_until = float("-inf")

    def forget(self) -> None:
        """The list is not to be relied on: there is no conductor, or a new one that gathers its members."""
        self._empty_since.clear()
        self._turns.clear()

    def moved(self, now: float) -> None:
        """This peer has moved, or begun to."""
        self._stays_until = now + MOVE_AGAIN_S
        self.forget()

    def look(self, now: float, members: Iterable[MemberInfo]) -> Move | None:
        """This peer's move, if it has its turn now."""
        posts = [member for member in members if member.since and member.stage in self._stages]
        empty = [stage for stage in self._stages if all(post.stage != stage for post in posts)]
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in empty}
        self._turns = {stage: turn for stage, turn in self._turns.items() if stage in self._empty_since}
        move = None
        for stage in empty if posts else []:
            peer = self._turn(now, stage, posts)
            source = next((post.stage for post in posts if post.peer == peer), None)
            if source is None:
                continue
            if peer == self._own and now >= self._stays_until:
                mates = [p for p in posts if p.stage == source and p.peer != peer]
                ready = frozenset(mate.peer for mate in mates if mate.ready)
                empty_s = now - self._empty_since[stage]
                move = Move(source, stage, empty_s, tuple(mate.peer for mate in mates), ready)
            posts = [post for post in posts if post.peer != peer]  # for further empty stages it is not there
        return move

    def _turn(self, now: float, stage: int, posts: Sequence[MemberInfo]) -> str | None:
        """The peer that has its turn to move to `stage`; None: nobody has. It stays the same for the turn's time."""
        waited_s = now - self._empty_since[stage] - EMPTY_S
        if waited_s < 0:
            return None
        had, order = self._turns.setdefault(stage, []), _in_turn(posts)
        while len(had) <= waited_s // TURN_S:
            had.append(next((peer for peer in order if peer not in had), order[0] if order else None))
        return had[-1]


def _in_turn(posts: Sequence[MemberInfo]) -> list[str]:
    """Peers that their stages can spare, in the order in which they move.

    Those of the best-staffed stage come first; in it those that lack the current state, and then the latest to come.
    A peer that holds several posts stays.
    """
    staff = Counter(post.stage for post in posts)
    several = {peer for peer, held in Counter(post.peer for post in posts).items() if held > 1}
    spare = [post for post in posts if staff[post.stage] > 1 and post.peer not in several]
    spare.sort(key=lambda post: (-staff[post.stage], post.stage, post.ready, -post.since, post.peer))
    return [post.peer for post in spare]
