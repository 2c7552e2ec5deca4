"""The roster of a run: its live members, their positions and microbatches, and the network rates that peers declare.

A member is a peer at one stage (a post). A helper only sums for a stage; only its network rates are known. `version`
increases with each change of what members see. Bookkeeping only: the conductor decides who is admitted, ready or
removed. Hostile input: hellos of any content; each affects only its sender's post, and there are never more than
MAX_MEMBERS members.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final

from peerd.averaging.work_split import WorkSplitter
from peerd.core.bounded_dict import BoundedDict
from peerd.messages.swarm import MAX_MEMBERS, LineInfo, Mb, MemberInfo, Position
from peerd.swarm.events import MemberHello
from peerd.swarm.posts import peer_of

_NEWS: Final = 1.5  # ratio of rates above which a change is published
START = Position(0, b"")  # where every peer begins: parameters are a pure function of the run's seed


@dataclass(slots=True)
class RosterEntry:
    """A stage peer as the conductor knows it."""

    stage: int
    session: int
    position: Position
    prepared: Position | None
    saved: frozenset[Position]
    held: frozenset[Mb]
    counted: frozenset[Mb]
    addrs: tuple[str, ...]
    early: frozenset[Mb] = frozenset()
    since: float = 0.0
    digest: bytes = b""  # of its last mean
    seen: frozenset[Position] = frozenset()  # positions of the swarm that it stepped to, or received from a conductor

    @classmethod
    def of(cls, hello: MemberHello) -> RosterEntry:
        """The entry of a member, from its hello."""
        return cls(
            stage=hello.stage,
            session=hello.session,
            position=hello.position,
            prepared=hello.prepared,
            saved=frozenset(hello.saved),
            held=hello.held,
            counted=hello.counted,
            addrs=hello.addrs,
            early=hello.early,
            since=hello.since,
            digest=hello.digest,
            seen=frozenset(hello.seen),
        )

    @property
    def reach(self) -> set[Position]:
        """Positions that the member claims to have or to be able to reach."""
        return {self.position, *self.saved, *([self.prepared] if self.prepared else [])}

    def has(self, position: Position) -> bool:
        """True if the member claims to be there or to have saved it, and not only to have prepared the step there."""
        return position == self.position or position in self.saved

    @property
    def saw(self) -> set[Position]:
        """Positions that the member confirms: those that it can reach, and those that it has seen."""
        return self.reach | self.seen

    @property
    def is_anywhere(self) -> bool:
        """True if the member claims to have, or to be able to reach, any position but the start."""
        return self.reach != {START}

    def move(self, position: Position, *, stepped: bool) -> None:
        """Record the arrival at `position`. `stepped`: by this conductor's own step.

        Early microbatches are those of the next step that a member computed before the commit. After a step of this
        conductor, trainers report them again. Otherwise, if the member continues from its prepared step, they count
        for the current step.
        """
        goes_on = position == self.prepared and not stepped
        self.held, self.early = self.early if goes_on else frozenset(), frozenset()
        self.position, self.prepared, self.counted = position, None, frozenset()


class Roster:
    """The members of all `stages`. `delayed`: a member may hold microbatches for the step after its own."""

    def __init__(self, stages: int, *, delayed: bool = False) -> None:
        self.stages, self._delayed = range(stages), delayed
        self.entries: dict[str, RosterEntry] = {}  # by post
        self._at: list[dict[Position, dict[str, None]]] = [{} for _ in self.stages]  # posts by stage and position
        self.lines = WorkSplitter()
        self._rates: dict[str, float] = {}  # of posts, as published in the member list
        self._helped = BoundedDict[str, None](MAX_MEMBERS)  # peers that have helped to make a step
        self.version = 1  # of what members see
        self.listed = 1  # version of the last change that may affect the member list,
        self._listed_of = 0, 0  # and the counts of changes of lines and positions at that time
        self.stands = 0  # number of changes of members' positions, present and reachable
        self._witnesses: dict[Position, set[str]] = {}  # the posts that confirm each position,
        self._bears_out: dict[str, set[Position]] = {}  # and the positions that each post confirms, as indexed there
        self._stood = set[str]()  # posts whose positions have changed since
        self._lagging = list[int]()  # cache of `lagging_stages`,
        self._lagged: tuple[int, Position | None] = (-1, None)  # and the `stands` and position that it is for

    # --- changes ----------------------------------------------------------------------------------------------

    def has_room(self, peer: str) -> bool:
        """True if this peer has an entry, or may get one."""
        return peer in self.entries or len(self.entries) < MAX_MEMBERS

    def enter(self, hello: MemberHello) -> RosterEntry:
        """Create the member's entry from its hello, in place of an older entry."""
        self._leave(hello.peer)
        entry = self.entries[hello.peer] = RosterEntry.of(hello)
        self._at[entry.stage].setdefault(entry.position, {})[hello.peer] = None
        if not self._delayed:
            entry.early = frozenset()
        self._stands(hello.peer)
        self.change()
        return entry

    def remove(self, peer: str) -> RosterEntry | None:
        """Remove a peer. Returns its entry, or None if it had none, as in the case of a helper."""
        self._leave(peer)
        entry = self.entries.pop(peer, None)
        self._rates.pop(peer, None)
        self._stands(peer)
        if self.lines.forget(peer) or entry is not None:
            self.change()
        return entry

    def move(self, peer: str, position: Position, *, stepped: bool) -> None:
        """Record that a member has arrived at `position`; see `RosterEntry.move`."""
        self._leave(peer)
        entry = self.entries[peer]
        entry.move(position, stepped=stepped)
        self._stands(peer)
        self._at[entry.stage].setdefault(position, {})[peer] = None

    def note_helped(self, post: str) -> None:
        """Record that the peer of this post has helped to make a step."""
        self._helped[peer_of(post)] = None

    def _stands(self, peer: str) -> None:
        self.stands += 1
        self._stood.add(peer)

    def _leave(self, peer: str) -> None:
        entry = self.entries.get(peer)
        if entry is not None:
            there = self._at[entry.stage]
            there[entry.position].pop(peer)
            if not there[entry.position]:
                del there[entry.position]

    def note_saved(self, peer: str, positions: Iterable[Position]) -> None:
        """Record the checkpoints that a member has now."""
        entry, saved = self.entries.get(peer), frozenset(positions)
        if entry is not None and entry.saved != saved:
            entry.saved = saved
            self._stands(peer)

    def note_line(self, peer: str, stage: int, line: LineInfo, addrs: tuple[str, ...]) -> None:
        """Record the network rates that a member, or a helper of `stage`, declares."""
        if self.lines.tell(peer, stage, line, addrs):
            self.change()

    def note_rates(self, rates: Mapping[str, float]) -> None:
        """Record members' estimated rates for the member list; small changes are ignored."""
        news = {
            post: rate
            for post, rate in rates.items()
            if post in self.entries and not _same_rate(rate, self._rates.get(post, 0.0))
        }
        if news:
            self._rates |= news
            self.change()

    def change(self, *, listed: bool = True) -> None:
        """Record a change of what members see. `listed`: it may affect the member list, or which members serve."""
        self.version += 1
        now = self.lines.changes, self.stands  # such changes are published with the next other change
        if listed or now != self._listed_of:
            self.listed, self._listed_of = self.version, now

    # --- views ------------------------------------------------------------------------------------------------

    def witnesses(self, position: Position) -> Set[str]:
        """Posts of the members that confirm `position` (`RosterEntry.saw`)."""
        self._note_witnesses()
        return self._witnesses.get(position, frozenset())

    def witnessed(self) -> Set[Position]:
        """Positions that members confirm."""
        self._note_witnesses()
        return self._witnesses.keys()

    def _note_witnesses(self) -> None:
        for post in self._stood:
            entry, before = self.entries.get(post), self._bears_out.pop(post, set())
            now = entry.saw if entry is not None else set()
            for lost in before - now:
                self._witnesses[lost].discard(post)
                if not self._witnesses[lost]:
                    del self._witnesses[lost]
            for new in now - before:
                self._witnesses.setdefault(new, set()).add(post)
            if now:
                self._bears_out[post] = now
        self._stood.clear()

    def session(self, peer: str) -> int | None:
        """Session number of a live member, or None if the peer is not a member."""
        return entry.session if (entry := self.entries.get(peer)) is not None else None

    def since(self, peer: str) -> float:
        """Time at which a member joined its stage, or 0 if the peer is not a member."""
        return entry.since if (entry := self.entries.get(peer)) is not None else 0.0

    def of_stage(self, stage: int) -> list[str]:
        """The members of a stage, sorted."""
        return sorted(peer for posts in self._at[stage].values() for peer in posts)

    def at(self, stage: int, position: Position | None) -> list[str]:
        """The members of a stage that are at `position`, sorted."""
        return sorted(self._at[stage].get(position, ())) if position is not None else []

    def empty_stages(self) -> list[int]:
        """Stages without members."""
        return [] if all(self._at) else [stage for stage in self.stages if not self._at[stage]]

    def held_stages(self) -> list[int]:
        """Stages with a member that claims to have, or to be able to reach, any position but the start."""
        return sorted({entry.stage for entry in self.entries.values() if entry.is_anywhere})

    def lagging_stages(self, position: Position | None) -> list[int]:
        """Stages without a member at `position`."""
        if self._lagged != (self.stands, position):  # every report asks, and members rarely move
            lagging = [stage for stage in self.stages if position is None or position not in self._at[stage]]
            self._lagged, self._lagging = (self.stands, position), lagging
        return list(self._lagging)

    def check(self) -> None:
        """Raise AssertionError unless the indexes match the entries."""
        found = {(s, p, peer) for s, there in enumerate(self._at) for p, posts in there.items() for peer in posts}
        assert found == {(entry.stage, entry.position, peer) for peer, entry in self.entries.items()}
        assert all(posts for there in self._at for posts in there.values())
        self._note_witnesses()
        bears_out = {(position, post) for post, entry in self.entries.items() for position in entry.saw}
        assert bears_out == {(position, post) for position, posts in self._witnesses.items() for post in posts}

    def batch_before(self, target: Position, part_of_run: Container[str]) -> set[Mb]:
        """The batch that led to `target`, as far as members remember it. Trainers do not compute it again.

        If any member of the `part_of_run` has that mean, only such members count.
        """
        has = {post: m for post, m in self.entries.items() if target == (m.prepared or m.position)}  # last mean
        known = [m for post, m in has.items() if post in part_of_run and m.counted]
        return set[Mb]().union(*(entry.counted for entry in known or has.values()))

    def members(self, serves: Callable[[str, Position], bool], resting: Container[str] = ()) -> list[MemberInfo]:
        """All live members, sorted by post, then the helpers. `serves(post, position)`: True if it is ready."""
        members = [
            MemberInfo(
                peer=peer,
                stage=m.stage,
                addrs=list(m.addrs),
                ready=serves(peer, m.position),
                client=self.lines.is_client(peer),
                since=m.since,
                rate=self._rates.get(peer, 0.0),
                helped=peer_of(peer) in self._helped,
                rests=peer in resting,
            )
            for peer, m in sorted(self.entries.items())
        ]
        return members + self.lines.helpers()


def _same_rate(one: float, other: float) -> bool:
    return one == other or max(one, other) <= _NEWS * min(one, other)
