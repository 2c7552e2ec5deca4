"""The roster of a run: its living members, where each stands and what it holds, and the lines that peers state.

A member is a peer at one stage (a post); a helper only sums for a stage, and is known by its line alone. `version`
numbers what members are told: it grows with each change of it. Bookkeeping only: who is let in, who is ready for what
and who must go, its conductor decides. Hostile input: hellos of any content; each tells of its sender's post only, and
there are never more than MAX_MEMBERS members.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.messages.swarm import MAX_MEMBERS, LineInfo, Mb, MemberInfo, Position
from peerd.machine.averaging.work_split import WorkSplitter
from peerd.machine.swarm.events import MemberHello
from peerd.machine.swarm.posts import peer_of

_NEWS: Final = 1.5  # times more, or less: another rate
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
    digest: bytes = b""  # of the last mean it has
    seen: frozenset[Position] = frozenset()  # positions of the swarm that it took part in, or was told of

    @classmethod
    def of(cls, hello: MemberHello) -> RosterEntry:
        """The entry of a member that has just said all this."""
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
        """Positions where the member says that it stands, or could go."""
        return {self.position, *self.saved, *([self.prepared] if self.prepared else [])}

    def has(self, position: Position) -> bool:
        """True when the member says that it stands there, or has saved it: it did more than prepare the step there."""
        return position == self.position or position in self.saved

    @property
    def saw(self) -> set[Position]:
        """Positions that it bears out: those it could go to, and those it has seen."""
        return self.reach | self.seen

    @property
    def is_anywhere(self) -> bool:
        """True when it says that it is, or could be, anywhere but at the start."""
        return self.reach != {START}

    def move(self, position: Position, *, stepped: bool) -> None:
        """Arrival at `position`. `stepped`: by this conductor's own step, of which trainers tell what it holds early.

        Else, where it goes on from what it had prepared, what it held early is of the step under way now.
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
        self._rates: dict[str, float] = {}  # of posts, as the list of members has them
        self._helped = BoundedDict[str, None](MAX_MEMBERS)  # peers that helped to make a step
        self.version = 1  # of what members see
        self.listed = 1  # of these, the last that may be a change of the list of members,
        self._listed_of = 0, 0  # and the numbers of changes of lines and stands then
        self.stands = 0  # number of changes of where members are, or could go
        self._witnesses: dict[Position, set[str]] = {}  # the posts that bear each position out,
        self._bears_out: dict[str, set[Position]] = {}  # and the positions of each post, as they are in there
        self._stood = set[str]()  # posts that have moved since
        self._lagging = list[int]()  # the stages without a member at a position, and when this was found for which
        self._lagged: tuple[int, Position | None] = (-1, None)

    # --- changes ----------------------------------------------------------------------------------------------

    def has_room(self, peer: str) -> bool:
        """May this peer have an entry?"""
        return peer in self.entries or len(self.entries) < MAX_MEMBERS

    def enter(self, hello: MemberHello) -> RosterEntry:
        """The member's entry, made anew from its hello."""
        self._leave(hello.peer)
        entry = self.entries[hello.peer] = RosterEntry.of(hello)
        self._at[entry.stage].setdefault(entry.position, {})[hello.peer] = None
        if not self._delayed:
            entry.early = frozenset()
        self._stands(hello.peer)
        self.change()
        return entry

    def remove(self, peer: str) -> RosterEntry | None:
        """The entry of a member that is gone; None: it had none, it may have been a helper."""
        self._leave(peer)
        entry = self.entries.pop(peer, None)
        self._rates.pop(peer, None)
        self._stands(peer)
        if self.lines.forget(peer) or entry is not None:
            self.change()
        return entry

    def move(self, peer: str, position: Position, *, stepped: bool) -> None:
        """A member has arrived at `position`; see `RosterEntry.move`."""
        self._leave(peer)
        entry = self.entries[peer]
        entry.move(position, stepped=stepped)
        self._stands(peer)
        self._at[entry.stage].setdefault(position, {})[peer] = None

    def note_helped(self, post: str) -> None:
        """The peer of this post has helped to make a step."""
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
        """The checkpoints that a member has now."""
        entry, saved = self.entries.get(peer), frozenset(positions)
        if entry is not None and entry.saved != saved:
            entry.saved = saved
            self._stands(peer)

    def note_line(self, peer: str, stage: int, line: LineInfo, addrs: tuple[str, ...]) -> None:
        """The line of a member, or of a helper of `stage`, as it states it."""
        if self.lines.tell(peer, stage, line, addrs):
            self.change()

    def note_rates(self, rates: Mapping[str, float]) -> None:
        """The rates that members are believed to have, for the list of members: small changes are no news."""
        news = {
            post: rate
            for post, rate in rates.items()
            if post in self.entries and not _same_rate(rate, self._rates.get(post, 0.0))
        }
        if news:
            self._rates |= news
            self.change()

    def change(self, *, listed: bool = True) -> None:
        """A change of what members are told of; `listed`: perhaps of the list of members, or of who serves."""
        self.version += 1
        now = self.lines.changes, self.stands  # alone they are no news, and are told of with the next ones
        if listed or now != self._listed_of:
            self.listed, self._listed_of = self.version, now

    # --- views ------------------------------------------------------------------------------------------------

    def witnesses(self, position: Position) -> Set[str]:
        """The posts of the members that bear `position` out (`RosterEntry.saw`)."""
        self._note_witnesses()
        return self._witnesses.get(position, frozenset())

    def witnessed(self) -> Set[Position]:
        """The positions that members bear out."""
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
        """The session of a living member; None: it is none."""
        return entry.session if (entry := self.entries.get(peer)) is not None else None

    def since(self, peer: str) -> float:
        """The moment at which a member joined its stage; 0 where it is none."""
        return entry.since if (entry := self.entries.get(peer)) is not None else 0.0

    def of_stage(self, stage: int) -> list[str]:
        """A stage's members, sorted."""
        return sorted(peer for posts in self._at[stage].values() for peer in posts)

    def at(self, stage: int, position: Position | None) -> list[str]:
        """A stage's members that stand at `position`, sorted."""
        return sorted(self._at[stage].get(position, ())) if position is not None else []

    def empty_stages(self) -> list[int]:
        """Stages without any member."""
        return [] if all(self._at) else [stage for stage in self.stages if not self._at[stage]]

    def held_stages(self) -> list[int]:
        """Stages with a member that is, or could go, anywhere but to the start."""
        return sorted({entry.stage for entry in self.entries.values() if entry.is_anywhere})

    def lagging_stages(self, position: Position | None) -> list[int]:
        """Stages of which no member stands at `position`."""
        if self._lagged != (self.stands, position):  # each report asks, and members seldom move
            lagging = [stage for stage in self.stages if position is None or position not in self._at[stage]]
            self._lagged, self._lagging = (self.stands, position), lagging
        return list(self._lagging)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken: posts by stage and position are those of the entries."""
        found = {(s, p, peer) for s, there in enumerate(self._at) for p, posts in there.items() for peer in posts}
        assert found == {(entry.stage, entry.position, peer) for peer, entry in self.entries.items()}
        assert all(posts for there in self._at for posts in there.values())
        self._note_witnesses()
        bears_out = {(position, post) for post, entry in self.entries.items() for position in entry.saw}
        assert bears_out == {(position, post) for position, posts in self._witnesses.items() for post in posts}

    def batch_before(self, target: Position, part_of_run: Container[str]) -> set[Mb]:
        """The batch that led to `target`, from what members remember of it: those that were part of the run before, if
        any of them has that mean, for trainers do not compute again what counts.
        """
        has = {post: m for post, m in self.entries.items() if target == (m.prepared or m.position)}  # the last mean
        known = [m for post, m in has.items() if post in part_of_run and m.counted]
        return set[Mb]().union(*(entry.counted for entry in known or has.values()))

    def members(self, serves: Callable[[str, Position], bool], resting: Container[str] = ()) -> list[MemberInfo]:
        """Every living member, sorted by post, and then the helpers. `serves`: is one that stands there ready?"""
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
