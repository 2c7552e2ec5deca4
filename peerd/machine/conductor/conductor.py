"""The conductor's decisions: who takes part, when the batch is whole, when every stage averages and steps.

A step goes OPEN (microbatches are admitted and reported) -> CLOSING (each stage averages; a stage whose attempt
fails tries again with the peers that are left) -> MOVING (every member commits) -> OPEN. A new conductor starts
in GATHERING: it waits for the members, adopts what they hold, and moves them to the newest position that every
stage can reach, as far as enough members stand behind it (`recovery`). All stages commit the same batch or none does.
In a delayed run the next batch is filled while this one closes and moves; it closes when this step is made. Decides
only: no tensors, no sockets, no clock. A hostile member can stall a step by false reports until it is put aside
(`stage_close`), a hostile trainer until others get its place (`admission`); neither can make a batch count twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from enum import Enum, auto

from peerd.core.messages.swarm import MAX_MEMBERS, LineInfo, Mb, MemberInfo, Position, Redo
from peerd.machine.averaging.work_split import Lines
from peerd.machine.batch.batches import Batches, StageView
from peerd.machine.conductor.gathering import Gathering
from peerd.machine.conductor.recovery import Established, Knowledge, agreeing_on, best_position, furthest
from peerd.machine.conductor.stage_close import Closing
from peerd.machine.swarm.events import (
    ConductorConfig,
    Event,
    MemberGone,
    MemberHello,
    MoveEnded,
    Note,
    Origin,
    Output,
    PrepareEnded,
    SendMove,
    TrainerGone,
    TrainerReport,
)
from peerd.machine.swarm.revisions import Versions
from peerd.machine.swarm.roster import START, RosterEntry


class Phase(Enum):
    GATHERING = auto()
    OPEN = auto()
    CLOSING = auto()
    MOVING = auto()
    COMPLETE = auto()


class Conductor:
    """See the module's header. Feed events with `handle`, time with `wake`; read answers from the views."""

    def __init__(self, config: ConductorConfig, rng: random.Random, now: float, origin: Origin | None = None) -> None:
        self._config, self._origin = config, origin or Origin()
        self._rng = rng
        self.phase = Phase.GATHERING
        self.current: Position | None = None
        self._versions = Versions()  # of what trainers see
        self.batches = Batches(config.stages, config.microbatches, self._versions)
        self.members_version = 1  # of what members see
        self.lines = Lines()
        self._members: dict[str, RosterEntry] = {}
        self._established = Established(self._origin.own, self._origin.established)
        self._closing = Closing(config, self.batches, self.lines, rng, self._origin)
        self._closing.proven = lambda peer: peer in self._established
        self._closing.session = lambda peer: m.session if (m := self._members.get(peer)) else None
        self._closing.since = lambda peer: m.since if (m := self._members.get(peer)) else 0.0
        self._target: Position | None = None  # where a close or a move leads
        self._committing = False  # is this move a step?
        self._moving: set[str] = set()
        self._gathering = Gathering(config, now)
        self.announced_step = 0  # the newest step that anyone out of reach is said to be at: counts for a while
        self.kept_step = 0  # the newest that somebody keeps who can be reached
        self._believes_hearsay = True
        self.has_stepped = False  # in this conductor's reign
        self.lost = False  # every stage has members, and they cannot go on with what they have
        self._broken_since: float | None = None
        self._late: dict[str, int] = {}  # for which trainers the step waits, and for how many microbatches of each
        self._out: list[Output] = []

    # --- what drives it ---------------------------------------------------------------------------------------

    def handle(self, now: float, event: Event) -> list[Output]:
        """Take one event; returns what to do now."""
        match event:
            case MemberHello():
                self._hello(now, event)
            case MemberGone(peer):
                self._member_gone(now, peer)
            case TrainerReport():
                self._report(now, event)
            case TrainerGone(peer):
                self.batches.trainers.gone(peer)
                self._versions.change_all()
            case PrepareEnded():
                self._closing.ended(now, event)
            case MoveEnded(peer, position):
                self._move_ended(now, peer, position)
        return self._advance(now)

    def expect(self, peers: Iterable[str]) -> None:
        """Members that are said to live: a new conductor does not decide at once without them."""
        self._gathering.expect(peers)

    def unexpect(self, peer: str) -> None:
        """This one cannot be reached."""
        self._gathering.unexpect(peer)

    def saved(self, peer: str, positions: Iterable[Position]) -> None:
        """The checkpoints a member has now."""
        if peer in self._members:
            self._members[peer].saved = frozenset(positions)

    def said_of_line(self, now: float, peer: str, stage: int, line: LineInfo, addrs: tuple[str, ...] = ()) -> None:
        """What a member, or a helper of `stage`, says of its line; a helper that is put aside is not heard."""
        if not self._closing.keeps_out(now, peer):
            self.members_version += self.lines.tell(peer, stage, line, addrs)

    def wake(self, now: float) -> list[Output]:
        """Time passed."""
        return self._advance(now)

    def wake_at(self, now: float) -> float:
        """When `wake` is due at the latest."""
        due = now + 5.0
        if self.phase is Phase.GATHERING:
            due = min(due, self._gathering.due if self._gathering.due > now else due)
        if self._broken_since is not None and (decided := self._broken_since + self._config.broken_s) > now:
            due = min(due, decided)
        if self.phase is Phase.CLOSING and (close_due := self._closing.due()) is not None:
            due = min(due, close_due)
        if self.phase is Phase.OPEN and self.batches.due.full:
            due = min(due, now + 1.0)  # somebody may be late
        return max(due, now + 0.01)

    # --- what others may see ----------------------------------------------------------------------------------

    def version(self, trainer: str) -> int:
        """Of what this trainer sees."""
        return self._versions.of(trainer)

    @property
    def newest(self) -> tuple[int, int]:
        """Versions of all that trainers and members see: nobody has news while these stay."""
        return self._versions.newest, self.members_version

    @property
    def settled(self) -> Position | None:
        """Where every member should stand; None while members are on their way."""
        return self.current if self.phase in (Phase.OPEN, Phase.CLOSING, Phase.COMPLETE) else None

    def is_member(self, peer: str, session: int) -> bool:
        return (member := self._members.get(peer)) is not None and member.session == session

    def knows(self, peer: str, position: Position) -> bool:
        """Is this where we believe the member to stand?"""
        return self._members[peer].position == position

    def members(self) -> list[MemberInfo]:
        """Every living member, sorted by peer, and then the helpers."""
        members = [
            MemberInfo(peer, m.stage, list(m.addrs), self._serves(peer, m.stage), self.lines.is_client(peer), m.since)
            for peer, m in sorted(self._members.items())
        ]
        return members + self.lines.helpers()

    def admitted(self, trainer: str, early: bool = False) -> list[int]:
        """The trainer's microbatches in this step's batch, or in the next one's."""
        return (self.batches.early if early else self.batches.due).of_trainer(trainer)

    def redo(self, trainer: str) -> list[Redo]:
        return self.batches.redo(trainer, self._closing.settled)

    def counted(self, trainer: str, step: int) -> list[int] | None:
        """The trainer's microbatches in the batch of `step`; None: nobody knows any more."""
        return self.batches.counted.of(trainer, step) if self.current is not None and step < self.current.step else []

    def takes(self, step: int) -> bool:
        """Are reports about microbatches of `step`, and early ones, taken now? If not, they are repeated later."""
        return self.current is not None and step == self.current.step and self._working

    @property
    def _working(self) -> bool:
        return self.phase in (Phase.OPEN, Phase.CLOSING) or (self._config.delayed and self._committing)

    def evaluates(self, trainer: str) -> bool:
        """One trainer evaluates: the first by name."""
        return trainer == self.batches.trainers.first()

    def waits_for(self) -> str:
        """Why no microbatch is admitted, or for whom the step waits; "" when nobody is in the way."""
        if blocked := self._blocked():
            return blocked
        late = [f"…{trainer[-8:]}, which has not finished {count}" for trainer, count in list(self._late.items())[:3]]
        return f"trainer {', '.join(late)}" if late and self.phase is Phase.OPEN else ""

    def _blocked(self) -> str:
        """Why no microbatch is admitted, or "" when the step is open."""
        empty = [str(s) for s in range(self._config.stages) if not self._of_stage(s)]
        if empty:
            return f"stage {', '.join(empty)} has no peers"
        if self.phase is Phase.GATHERING:
            if self._best_position() is not None:
                return "the conductor gathers the members"
            ahead = furthest(self._members)
            told = f"; peer …{ahead[0][-8:]} says that it has step {ahead[1]}" if ahead else ""
            return f"no position that every stage can reach: a peer or a checkpoint with newer state is missing{told}"
        lagging = [str(s) for s in range(self._config.stages) if not self._ready(s)]
        if lagging and self.phase is Phase.OPEN:
            return f"stage {', '.join(lagging)} has no peer with the current state"
        for stage, close in enumerate(self._closing.stages):
            if close.problem:
                return f"stage {stage} cannot average: {close.problem}"
        return "the run is complete" if self.phase is Phase.COMPLETE else ""

    def awaited(self) -> set[str]:
        """Who has not yet done what it was asked to: averaged, or moved."""
        return self._moving or {peer for close in self._closing.stages if close.attempt for peer in close.waiting}

    def whole_in_s(self, now: float) -> float | None:
        """Seconds until the batch is whole; None: nobody knows, or something else is waited for."""
        if self.phase is Phase.OPEN and not self._blocked():
            return self.batches.whole_in_s(now)
        return 0.0 if self.phase in (Phase.CLOSING, Phase.MOVING) else None

    # --- members ----------------------------------------------------------------------------------------------

    def _hello(self, now: float, hello: MemberHello) -> None:
        if not 0 <= hello.stage < self._config.stages or self._closing.keeps_out(now, hello.peer):
            return
        if len(self._members) >= MAX_MEMBERS and hello.peer not in self._members:
            return
        known = self._members.get(hello.peer)
        if known is not None and (known.session != hello.session or known.stage != hello.stage):
            self._member_gone(now, hello.peer)
        self._members[hello.peer] = RosterEntry(
            hello.stage,
            hello.session,
            hello.position,
            hello.prepared,
            frozenset(hello.saved),
            hello.held,
            hello.counted,
            hello.addrs,
            hello.early if self._config.delayed else frozenset(),
            hello.since,
            hello.digest,
        )
        due, early = frozenset[Mb](), frozenset[Mb]()
        if hello.position == self.current:
            due, early = hello.held, self._members[hello.peer].early
        elif self._committing and hello.position == self._target:
            early = hello.held
        self.batches.told(now, (hello.peer, hello.stage, hello.session), due, early)
        if self.phase is Phase.GATHERING:
            self._gathering.heard(now, hello.peer)
        elif self._is_ahead(hello.peer):
            self._gather_anew(now, "members are further than the conductor knew")
        self.members_version += 1
        self._versions.change_all()

    def _member_gone(self, now: float, peer: str) -> None:
        member = self._members.pop(peer, None)
        self._closing.lost(peer, member.stage if member is not None else None)
        self.members_version += self.lines.forget(peer)
        if member is None:
            return
        self.batches.lose(peer, now)
        self._moving.discard(peer)
        self.members_version += 1
        self._versions.change_all()

    def _is_ahead(self, peer: str) -> bool:
        """Says the member that it is further than the conductor knew, and has it enough others behind it?"""
        known, position = self._known, self._members[peer].position
        return known is not None and position.step > known.step and self._best_position() == position

    @property
    def _known(self) -> Position | None:
        """Where the swarm stands, as far as the conductor knows itself: by its own peer, when it is new."""
        own = self._members.get(self._origin.own)
        return self._target or self.current or (own.position if own is not None else None)

    def _of_stage(self, stage: int) -> list[str]:
        return sorted(peer for peer, m in self._members.items() if m.stage == stage)

    def _ready(self, stage: int) -> list[str]:
        return [peer for peer in self._of_stage(stage) if self._members[peer].position == self.current]

    def _serves(self, peer: str, stage: int) -> bool:
        """Can it take microbatches of this step, or of the next one?"""
        member = self._members.get(peer)
        if member is None or member.stage != stage or self.current is None:
            return False
        if self._committing:  # who was not in time for the average has to fetch the next state, and forgets
            return peer in self._moving or member.position == self._target
        return member.position == self.current

    # --- trainers ---------------------------------------------------------------------------------------------

    def _report(self, now: float, report: TrainerReport) -> None:
        self.batches.trainers.report(report.peer, report.open, report.early, report.step + 1)
        if self.takes(report.step):
            view = StageView(self._serves, self._closing.settled)
            if self.batches.take(now, report, view, self._config.delayed):
                self._reopen()

    # --- phases -----------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Output]:
        self._believes_hearsay = self._gathering.believes_hearsay(now)
        if self.phase is Phase.GATHERING and self._gathering.over(now, self._members):
            self._decide_position(now)
        if self.phase is Phase.MOVING and not self._moving:
            self._arrive(now)
        if self.phase in (Phase.OPEN, Phase.CLOSING):
            self._watch_for_empty_stages(now)
        if self.phase in (Phase.OPEN, Phase.CLOSING):
            self._drop_dead(now)
        if self.phase is Phase.OPEN and all(self._ready(s) for s in range(self._config.stages)):
            self.batches.fill(now, self._step, early=False)
            if self.batches.due.complete([False] * self._config.stages):
                self._begin_close()
        if self.phase is Phase.CLOSING:
            self._run_close(now)
        self._let_go(now)
        self._fill_early(now)
        lost = self._is_lost(now)
        self.members_version += lost != self.lost
        self.lost = lost
        if self._closing.changed:
            self._closing.changed = False
            self._versions.change_all()
        out, self._out, self._closing.out = self._closing.out + self._out, [], []
        return out

    def _let_go(self, now: float) -> None:
        """Of whom closing has put aside, and of what it took out of the batch."""
        while self._closing.aside or self._closing.shrank:
            aside, self._closing.aside = self._closing.aside, []
            for found in aside:
                self._member_gone(now, found.peer)
            if self._closing.shrank:
                self._closing.shrank = False
                self._reopen()

    def _drop_dead(self, now: float) -> None:
        """What nobody finishes goes to others."""
        config, settled = self._config, self._closing.settled
        self._late = self.batches.late(now, settled, (config.lease_s / 3, config.first_lease_s / 3))
        shrank, late = self.batches.drop_dead(now, settled, (config.lease_s, config.first_lease_s))
        for trainer, count in late.items():
            told = f"trainer …{trainer[-8:]} does not finish {count} microbatches that it was given"
            self._out.append(Note(f"{told}: others do them, and it is given less"))
        if shrank:
            self._reopen()

    @property
    def _step(self) -> int:
        return self.current.step if self.current is not None else 0

    def _fill_early(self, now: float) -> None:
        """In a delayed run, what this step has no room for is begun for the next one, if there is to be one."""
        if not self._config.delayed or not self._working or not self.batches.due.full:
            return
        served = all(any(self._serves(p, s) for p in self._of_stage(s)) for s in range(self._config.stages))
        if served and self._step + 1 != self._config.total_steps:
            self.batches.fill(now, self._step, early=True)

    def _is_lost(self, now: float) -> bool:
        """Has it waited long enough to know that nothing here leads on?"""
        broken = self._broken_since is not None and now - self._broken_since >= self._config.broken_s
        waits = broken or (self.phase is Phase.GATHERING and self._gathering.over(now, self._members))
        return waits and all(map(self._of_stage, range(self._config.stages))) and self._best_position() is None

    def _watch_for_empty_stages(self, now: float) -> None:
        if all(self._ready(s) for s in range(self._config.stages)):
            self._broken_since = None
        elif self._broken_since is None:
            self._broken_since = now
        elif now - self._broken_since >= self._config.broken_s and self._best_position() is not None:
            self._gather_anew(now, "a stage has lost the current state: looking for an older common position")

    def _gather_anew(self, now: float, why: str) -> None:
        """Nothing is certain any more but what the members say."""
        self._out.append(Note(why))
        self._broken_since = None
        self._reopen()
        self._moving.clear()
        self._committing = False
        self.phase = Phase.GATHERING
        self._gathering.begin(now)

    def _best_position(self) -> Position | None:
        config, announced = self._config, self.announced_step if self._believes_hearsay else 0
        announced = max(announced, self.kept_step)
        knowledge = Knowledge(config.stages, config.first_save, self._established, self._known, announced)
        return best_position(knowledge, self._members)

    def _decide_position(self, now: float) -> None:
        target = self._best_position()
        if self._gathering.begins_anew(now, target is not None) or target is None:
            return
        if target != self.current:
            self.batches.go_to(target.step, self._batch_before(target))
        self._target = target
        self._moving = set()
        agreeing = set[str]().union(*(agreeing_on(s, target, self._members) for s in range(self._config.stages)))
        for peer, member in sorted(self._members.items()):
            commit = target == member.prepared and peer in agreeing
            if member.position != target and (commit or target in (START, *member.saved)):
                self._moving.add(peer)
                self._out.append(SendMove(peer, target, commit=commit))
        self.phase = Phase.MOVING
        self._out.append(Note(f"the swarm stands at step {target.step}"))

    def _arrive(self, now: float) -> None:
        """Every member that could has reached the target."""
        assert self._target is not None
        if self.current != self._target:
            self.batches.step_made(self._target.step - 1)
        self.current, self._target = self._target, None
        self._closing.renew()
        if self._committing:
            self.has_stepped = True
            self._closing.step_made(self.current.step)
        for peer, member in self._members.items():
            if member.position != self.current:
                self.batches.lose(peer, now)
        if not self._committing:  # else trainers and we know better than what members said once
            self.batches.adopt(now, {p: m for p, m in sorted(self._members.items()) if m.position == self.current})
        self._committing = False
        total = self._config.total_steps
        self.phase = Phase.COMPLETE if total and self.current.step >= total else Phase.OPEN
        self._broken_since = None
        self._versions.change_all()
        self.members_version += 1

    def _batch_before(self, target: Position) -> set[Mb]:
        """The batch that led to `target`, from what the members remember of it."""
        batch: set[Mb] = set()
        for member in self._members.values():
            if target == (member.prepared or member.position):  # the last mean it has
                batch |= member.counted
        return batch

    # --- closing ----------------------------------------------------------------------------------------------

    def _begin_close(self) -> None:
        assert self.current is not None
        self._target = Position(self.current.step + 1, self._rng.randbytes(8))
        self._closing.renew()
        self._closing.step = self.current.step
        self.phase = Phase.CLOSING
        self.members_version += 1

    def _reopen(self) -> None:
        """The batch is not whole any more: forget every mean."""
        if self.phase is Phase.CLOSING:
            self._closing.renew()
            self._target = None
            self.phase = Phase.OPEN
            self._versions.change_all()

    def _run_close(self, now: float) -> None:
        assert self._target is not None
        self._closing.look(now)
        self._let_go(now)
        for stage in range(self._config.stages):
            group = self._ready(stage)
            if self.phase is Phase.CLOSING and group and self.batches.due.full and not self.batches.due.missing[stage]:
                self._closing.begin(now, stage, tuple(group), self._target.lineage)
        if self.phase is Phase.CLOSING and all(self._closing.settled) and self.batches.due.full:
            self._commit()

    def _commit(self) -> None:
        assert self._target is not None
        self.phase = Phase.MOVING
        self._committing = True
        self._moving = set()
        for close in self._closing.stages:
            for peer in sorted(close.prepared):
                self._moving.add(peer)
                self._out.append(SendMove(peer, self._target, commit=True))

    def _move_ended(self, now: float, peer: str, position: Position | None) -> None:
        if peer not in self._moving:
            return
        member = self._members[peer]
        self._moving.discard(peer)
        if position is None or position != self._target:
            self._member_gone(now, peer)
            return
        if self._committing:
            self._established.add(peer, member.stage)
        goes_on = position == member.prepared and not self._committing  # as it was told: what was early is held now
        member.held, member.early = member.early if goes_on else frozenset(), frozenset()
        member.position, member.prepared, member.counted = position, None, frozenset()
