"""Choice of a stage: for a peer that joins, and for one that could serve a stage that has no peer.

`place` assigns peers that join at the same moment to the stages in order of their arrival, so that two do not fill one
gap; all of them see the same list. A peer's own checkpoint is a reason, not a command: it decides between equally needy
stages, and has priority only if no other peer has that stage's state. `VacancyWatch` watches the conductor's list. When
a stage has no peer, the peers of the best-staffed stages get a turn, one at a time, to move there (`Move`). Decides
only: the caller verifies that the stage is empty and that its own stage can spare the peer.

Hostile input: any list, any arrivals. These can make a peer choose another stage, and move once in a while, but never
twice within MOVE_AGAIN_S, and never from a stage that has no other peer by the list.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from peerd.messages.swarm import MemberInfo

EMPTY_S: Final = 5.0  # time without a peer before one moves there: a newcomer may join, or its own peer may return
TURN_S: Final = 15.0  # for one peer to move; then it is the next one's turn
MOVE_AGAIN_S: Final = 300.0  # a peer that has moved stays at least this long
CHOOSING_S: Final = 15.0  # for a peer that has just joined to choose a stage
TAKING_S: Final = 30.0  # for it to load the stage that it has chosen
_SAME: Final = 1.1  # times the least capacity: stages up to this are equally needy


@dataclass(frozen=True, slots=True)
class Seat:
    """A post of a live peer: a stage that it serves."""

    peer: str
    stage: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A peer about to serve a stage. `has`: stages of which it has a state, newest first; `takes`: its choice."""

    since: float
    peer: str
    has: tuple[int, ...] = ()
    takes: int | None = None

    def counts(self, wall: float) -> bool:
        """False if it has taken so long that the peer will probably not arrive."""
        return wall - self.since < (CHOOSING_S if self.takes is None else TAKING_S)


@dataclass(frozen=True, slots=True)
class Need:
    """Need for peers. `seats`: existing posts; `held`: stages whose state somebody has.

    `capacity`: microbatches per second of each stage. Empty if unknown; then the number of peers counts instead.
    """

    stages: int
    seats: Sequence[Seat]
    held: Set[int] = frozenset()
    capacity: Sequence[float] = ()


class _Staff:
    """Peers of each stage, including those on their way."""

    def __init__(self, need: Need, seats: Sequence[Seat]) -> None:
        self._stages = range(need.stages)
        self._count = Counter(seat.stage for seat in seats if seat.stage in self._stages)
        self._knows = len(need.capacity) == need.stages and any(need.capacity)
        each = need.capacity if self._knows else [float(self._count[stage]) for stage in self._stages]
        mean = sum(each) / max(1, len(seats)) or 1.0
        self._each = [each[stage] / self._count[stage] if self._count[stage] else mean for stage in self._stages]

    def add(self, stage: int) -> None:
        """Add a peer to the stage. It is assumed to have the mean speed of the others there."""
        self._count[stage] += 1

    def neediest(self, arrival: Arrival) -> tuple[int, str]:
        """The stage with the least capacity, and the reason. Among equals, one of which the peer has a checkpoint."""
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
            return stage, f"it does {can[stage]:.3g} microbatches a second, and no stage does fewer"
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
    """Arrivals with a state that no serving peer has, each with that stage; at most one for each stage."""
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
    """This peer's turn to move from stage `source` to `target`, empty for `empty_s` seconds. `mates` stay behind."""

    source: int
    target: int
    empty_s: float
    mates: tuple[str, ...]
    ready: frozenset[str]  # mates that have the current state, by the list


class VacancyWatch:
    """Watches the list of one conductor for stages without peers."""

    def __init__(self, own: str, stages: int) -> None:
        self._own, self._stages = own, range(stages)
        self._empty_since: dict[int, float] = {}
        self._turns: dict[int, list[str | None]] = {}  # stage -> the peers that had their turn; the last one has it now
        self._stays_until = float("-inf")

    def forget(self) -> None:
        """Start again, because the list is unreliable: there is no conductor, or a new one that gathers its members."""
        self._empty_since.clear()
        self._turns.clear()

    def moved(self, now: float) -> None:
        """Record that this peer has moved, or has begun to."""
        self._stays_until = now + MOVE_AGAIN_S
        self.forget()

    def look(self, now: float, members: Iterable[MemberInfo]) -> Move | None:
        """This peer's move if it has the turn now, otherwise None."""
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
            posts = [post for post in posts if post.peer != peer]  # it cannot fill further empty stages
        return move

    def _turn(self, now: float, stage: int, posts: Sequence[MemberInfo]) -> str | None:
        """The peer whose turn it is to move to `stage`, or None. It stays the same for TURN_S."""
        waited_s = now - self._empty_since[stage] - EMPTY_S
        if waited_s < 0:
            return None
        had, order = self._turns.setdefault(stage, []), _in_turn(posts)
        while len(had) <= waited_s // TURN_S:
            had.append(next((peer for peer in order if peer not in had), order[0] if order else None))
        return had[-1]


def _in_turn(posts: Sequence[MemberInfo]) -> list[str]:
    """Peers that their stages can spare, in the order in which they move.

    Those of the best-staffed stage come first; within it those that lack the current state, then the latest to join. A
    peer with several posts stays.
    """
    staff = Counter(post.stage for post in posts)
    several = {peer for peer, held in Counter(post.peer for post in posts).items() if held > 1}
    spare = [post for post in posts if staff[post.stage] > 1 and post.peer not in several]
    spare.sort(key=lambda post: (-staff[post.stage], post.stage, post.ready, -post.since, post.peer))
    return [post.peer for post in spare]
