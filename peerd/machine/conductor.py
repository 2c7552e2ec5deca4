"""The conductor's decisions: who takes part, when the batch is whole, when every stage averages and steps.

A step goes OPEN (microbatches are admitted and reported) -> CLOSING (each stage averages; a stage whose attempt
fails tries again with the peers that are left) -> MOVING (every member commits) -> OPEN. A new conductor starts
in GATHERING: it waits for the members, adopts what they hold, and moves them to the newest position that every
stage can reach. All stages commit the same batch or none does. In a delayed run the next batch is filled while this
one closes and moves; it closes when this step is made. Decides only: no tensors, no sockets, no clock.
A hostile member can stall a step by false reports until `ban_s` puts it aside; it cannot make a batch count twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from enum import Enum, auto

from peerd.core.training import LineInfo, Mb, MemberInfo, Position, Redo
from peerd.machine.batches import Batches, View
from peerd.machine.closing import StageClose, Standing
from peerd.machine.conducting import (
    CancelAttempt,
    ConductorConfig,
    Event,
    MemberGone,
    MemberHello,
    MoveEnded,
    Note,
    Output,
    PrepareEnded,
    SendMove,
    SendPrepare,
    TrainerGone,
    TrainerReport,
)
from peerd.machine.grouping import Grouping
from peerd.machine.reach import START, Member, best_position
from peerd.machine.shares import NoSplit
from peerd.machine.splitting import Lines
from peerd.machine.versions import Versions


class Phase(Enum):
    GATHERING = auto()
    OPEN = auto()
    CLOSING = auto()
    MOVING = auto()
    COMPLETE = auto()


class Conductor:
    """See the module's header. Feed events with `handle`, time with `wake`; read answers from the views."""

    def __init__(self, config: ConductorConfig, rng: random.Random, now: float) -> None:
        self._config = config
        self._rng = rng
        self.phase = Phase.GATHERING
        self.current: Position | None = None
        self._versions = Versions()  # of what trainers see
        self.batches = Batches(config.stages, config.microbatches, self._versions)
        self.members_version = 1  # of what members see
        self.lines = Lines()
        self._members: dict[str, Member] = {}
        self._closing = [StageClose() for _ in range(config.stages)]
        self._target: Position | None = None  # where a close or a move leads
        self._committing = False  # is this move a step?
        self._moving: set[str] = set()
        self._quiet_since = now
        self.announced_step = 0  # the newest step that anyone, in reach or not, is said to be at, or to keep
        self.lost = False  # every stage has members, and they cannot go on with what they have
        self._expected: frozenset[str] = frozenset()
        self._expect_until = now + config.expect_s
        self._broken_since: float | None = None
        self._standing = Standing(config.ban_s)
        self._grouping = Grouping(self.lines, config.group_size)
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
                self._trainer_gone(peer)
            case PrepareEnded():
                self._prepare_ended(now, event)
            case MoveEnded(peer, position):
                self._move_ended(now, peer, position)
        return self._advance(now)

    def expect(self, peers: Iterable[str]) -> None:
        """Members that are said to live: a new conductor does not decide at once without them."""
        self._expected = frozenset(peers)

    def unexpect(self, peer: str) -> None:
        """This one cannot be reached."""
        self._expected -= {peer}

    def saved(self, peer: str, positions: Iterable[Position]) -> None:
        """The checkpoints a member has now."""
        if peer in self._members:
            self._members[peer].saved = frozenset(positions)

    def said_of_line(self, now: float, peer: str, stage: int, line: LineInfo, addrs: tuple[str, ...] = ()) -> None:
        """What a member, or a helper of `stage`, says of its line; a helper that is put aside is not heard."""
        if not self._standing.banned(peer, now):
            self.members_version += self.lines.tell(peer, stage, line, addrs)

    def wake(self, now: float) -> list[Output]:
        """Time passed."""
        return self._advance(now)

    def wake_at(self, now: float) -> float:
        """When `wake` is due at the latest."""
        due = now + 5.0
        if self.phase is Phase.GATHERING:
            due = min(due, self._quiet_since + self._config.gather_s)
        if self._broken_since is not None and (decided := self._broken_since + self._config.broken_s) > now:
            due = min(due, decided)
        if self.phase is Phase.CLOSING:
            due = min([due, *(c.not_before for c in self._closing if not c.settled and not c.attempt)])
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
        member = self._members.get(peer)
        return member is not None and member.session == session

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
        return self.batches.redo(trainer, self._settled())

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
        """Why no microbatch is admitted, or "" when the step is open."""
        empty = [str(s) for s in range(self._config.stages) if not self._of_stage(s)]
        if empty:
            return f"stage {', '.join(empty)} has no peers"
        if self.phase is Phase.GATHERING:
            if self._best_position() is None:
                return "no position that every stage can reach: a peer or a checkpoint with newer state is missing"
            return "the conductor gathers the members"
        lagging = [str(s) for s in range(self._config.stages) if not self._ready(s)]
        if lagging and self.phase is Phase.OPEN:
            return f"stage {', '.join(lagging)} has no peer with the current state"
        for stage, close in enumerate(self._closing):
            if close.problem:
                return f"stage {stage} cannot average: {close.problem}"
        return "the run is complete" if self.phase is Phase.COMPLETE else ""

    def whole_in_s(self, now: float) -> float | None:
        """Seconds until the batch is whole; None: nobody knows, or something else is waited for."""
        if self.phase is Phase.OPEN and not self.waits_for():
            return self.batches.whole_in_s(now)
        return 0.0 if self.phase in (Phase.CLOSING, Phase.MOVING) else None

    # --- members ----------------------------------------------------------------------------------------------

    def _hello(self, now: float, hello: MemberHello) -> None:
        if not 0 <= hello.stage < self._config.stages or self._standing.banned(hello.peer, now):
            return
        if self.current is not None and hello.position.step > (self._target or self.current).step:
            self._gather_anew(now, "a member is further than the conductor knew")
        known = self._members.get(hello.peer)
        if known is not None and (known.session != hello.session or known.stage != hello.stage):
            self._member_gone(now, hello.peer)
        self._members[hello.peer] = Member(
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
        )
        due, early = frozenset[Mb](), frozenset[Mb]()
        if hello.position == self.current:
            due, early = hello.held, self._members[hello.peer].early
        elif self._committing and hello.position == self._target:
            early = hello.held
        self.batches.told(now, hello.peer, hello.stage, due, early)
        self._quiet_since = now
        self.members_version += 1
        self._versions.change_all()

    def _member_gone(self, now: float, peer: str) -> None:
        for close in self._closing:
            if close.involves(peer):
                self._grouping.observe(len(close.group), (peer,))
                self._cancel(close)
        self.members_version += self.lines.forget(peer)
        member = self._members.pop(peer, None)
        if member is None:
            return
        self.batches.lose(peer, now)
        close = self._closing[member.stage]
        close.prepared.discard(peer)
        if close.settled and not close.prepared:
            self._closing[member.stage] = StageClose()
        self._moving.discard(peer)
        self.members_version += 1
        self._versions.change_all()

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
            view = View(self._serves, self._settled())
            self._note_shrinking(self.batches.take(now, report, view, self._config.delayed))

    def _trainer_gone(self, peer: str) -> None:
        self.batches.trainers.gone(peer)
        self._versions.change_all()

    def _note_shrinking(self, shrank: bool) -> None:
        if shrank:
            self._reopen()

    def _settled(self) -> list[bool]:
        return [close.settled for close in self._closing]

    # --- phases -----------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Output]:
        if self.phase is Phase.GATHERING and self._gathered(now):
            self._decide_position()
        if self.phase is Phase.MOVING and not self._moving:
            self._arrive(now)
        if self.phase in (Phase.OPEN, Phase.CLOSING):
            self._watch_for_empty_stages(now)
        if self.phase in (Phase.OPEN, Phase.CLOSING):
            self._note_shrinking(self.batches.drop_dead(now, self._settled(), self._config.lease_s))
        if self.phase is Phase.OPEN and all(self._ready(s) for s in range(self._config.stages)):
            self.batches.fill(now, self._step, early=False)
            if self.batches.due.complete([False] * self._config.stages):
                self._begin_close()
        if self.phase is Phase.CLOSING:
            self._run_close(now)
        self._fill_early(now)
        lost = self._is_lost(now)
        self.members_version += lost != self.lost
        self.lost = lost
        out, self._out = self._out, []
        return out

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
        waits = broken or (self.phase is Phase.GATHERING and self._gathered(now))
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
        self.phase, self._quiet_since = Phase.GATHERING, now

    def _best_position(self) -> Position | None:
        return best_position(self._config.stages, self._members.values(), self._config.first_save, self.announced_step)

    def _gathered(self, now: float) -> bool:
        quiet = now >= self._quiet_since + self._config.gather_s
        return quiet and (self._expected <= self._members.keys() or now >= self._expect_until)

    def _decide_position(self) -> None:
        target = self._best_position()
        if target is None:
            return
        if target != self.current:
            self.batches.go_to(target.step, self._batch_before(target))
        self._target = target
        self._moving = set()
        for peer, member in sorted(self._members.items()):
            if member.position != target and (target == member.prepared or target in (START, *member.saved)):
                self._moving.add(peer)
                self._out.append(SendMove(peer, target, commit=target == member.prepared))
        self.phase = Phase.MOVING
        self._out.append(Note(f"the swarm stands at step {target.step}"))

    def _arrive(self, now: float) -> None:
        """Every member that could has reached the target."""
        assert self._target is not None
        if self.current != self._target:
            self.batches.step_made(self._target.step - 1)
        self.current, self._target = self._target, None
        self._closing = [StageClose() for _ in range(self._config.stages)]
        self._standing.forgive()
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
        self._closing = [StageClose() for _ in range(self._config.stages)]
        self.phase = Phase.CLOSING
        self.members_version += 1

    def _reopen(self) -> None:
        """The batch is not whole any more: forget every mean."""
        if self.phase is Phase.CLOSING:
            for close in self._closing:
                self._cancel(close)
            self._closing = [StageClose() for _ in range(self._config.stages)]
            self._target = None
            self.phase = Phase.OPEN
            self._versions.change_all()

    def _cancel(self, close: StageClose) -> None:
        if close.attempt:
            self._out.append(CancelAttempt(close.attempt))
            close.attempt = b""

    def _run_close(self, now: float) -> None:
        for stage, close in enumerate(self._closing):
            if close.settled or close.attempt or now < close.not_before or self.batches.due.missing[stage]:
                continue
            group = self._ready(stage)
            if group and self.batches.due.full:
                self._start_attempt(now, stage, close, tuple(group))
        if all(close.settled for close in self._closing) and self.batches.due.full:
            self._commit()

    def _start_attempt(self, now: float, stage: int, close: StageClose, group: tuple[str, ...]) -> None:
        assert self._target is not None
        try:
            how, close.problem = self._grouping.order(stage, group), ""
        except NoSplit as error:
            if close.problem != str(error):
                self._versions.change_all()
            close.problem, close.not_before = str(error), now + self._config.retry_s
            return
        close.begin(self._rng.randbytes(16), group, how.helpers)
        self._out += [Note(how.news)] if how.news else []
        assigned = self.batches.due.assigned(stage, group)
        for peer in (*group, *sorted(close.helpers)):
            part, rounds = tuple(assigned.get(peer, ())), how.rounds.get(peer, ())
            self._out.append(SendPrepare(peer, close.attempt, self._target.lineage, group, part, how.split, rounds))

    def _prepare_ended(self, now: float, end: PrepareEnded) -> None:
        close = next((c for c in self._closing if c.attempt and c.attempt == end.attempt), None)
        if close is None or (end.peer not in close.waiting and (end.ok or end.peer not in close.helpers)):
            return
        close.waiting.discard(end.peer)
        if end.ok:
            close.prepared.add(end.peer)
            if not close.waiting:
                close.settled, close.attempt = True, b""
                self._grouping.observe(len(close.group))
            return
        stage = self._closing.index(close)
        self.batches.due.unhold_of(end.peer, end.missing, stage, now)
        self._cancel(close)
        close.not_before = now + min(5.0, self._config.retry_s * 2**close.failures)
        close.failures += 1
        self._versions.change_all()
        self._accuse(now, end, len(close.group))

    def _accuse(self, now: float, end: PrepareEnded, members: int) -> None:
        lost = end.lost or (() if end.missing else (end.peer,))
        self._grouping.observe(members, lost)
        for peer in lost:
            helper = self.lines.is_helper(peer)
            if (peer in self._members or helper) and (ban_s := self._standing.accuse(now, peer, helper=helper)):
                self._out.append(Note(f"peer …{peer[-8:]} failed averaging and is put aside for {ban_s:.0f} s"))
                self._member_gone(now, peer)

    def _commit(self) -> None:
        assert self._target is not None
        self.phase = Phase.MOVING
        self._committing = True
        self._moving = set()
        for close in self._closing:
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
        goes_on = position == member.prepared and not self._committing  # as it was told: what was early is held now
        member.held, member.early = member.early if goes_on else frozenset(), frozenset()
        member.position, member.prepared, member.counted = position, None, frozenset()
