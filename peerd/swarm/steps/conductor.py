"""The conductor's decisions: membership, the batch's microbatches, and when every stage averages and steps.

A step passes OPEN (microbatches are admitted and reported) -> CLOSING (each stage averages; a stage whose attempt fails
tries again with the remaining peers) -> MOVING (every member commits) -> OPEN. A new conductor starts in GATHERING: it
waits for the members, adopts the microbatches that they hold, and moves them to the newest position that every stage
can reach and that enough members confirm (`recovery`). Either all stages commit the same batch, or none does. In a
delayed run the next batch is filled while this one closes and moves; it closes when this step is made.

Decides only: no tensors, no sockets, no clock. A hostile member can stall a step by false reports until it is banned
(`stage_close`, `blame`), and a hostile trainer until others get its slots (`admission`); neither can make a batch count
twice. A run whose gradients are all infinite or NaN goes back once (`divergence`).

Parts: `roster` (members), `course` (phase and positions), `search` (the position to resume from), `batches`
(microbatches), `StepCycle` (filling, averaging, committing) and `Rebalancing` (which stage a peer serves). This module
passes events to them and runs each in its phase.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from peerd.messages.swarm import LineInfo, Mb, MemberInfo, Position, Redo
from peerd.swarm.batch.batches import Batches
from peerd.swarm.batch.counted_work import CountedWork
from peerd.swarm.batch.divergence import Divergence
from peerd.swarm.events import (
    ConductorConfig,
    Event,
    MemberGone,
    MemberHello,
    MoveEnded,
    Note,
    Origin,
    Output,
    PrepareEnded,
    TrainerGone,
    TrainerReport,
    TransferRefused,
)
from peerd.swarm.positions.phases import Phase, RunPhase
from peerd.swarm.positions.position_search import PositionSearch
from peerd.swarm.posts import peer_of
from peerd.swarm.reader_versions import ReaderVersions
from peerd.swarm.rebalance.rebalance_rule import RebalanceConfig
from peerd.swarm.rebalance.rebalancing import Rebalancing
from peerd.swarm.roster import Roster
from peerd.swarm.steps.blame import Blame
from peerd.swarm.steps.rest_choice import RestChoice
from peerd.swarm.steps.stage_close import StageClosing
from peerd.swarm.steps.step_cycle import StepCycle

_IDLE_S = 5.0  # between wake-ups when nothing is due
_LATE_LOOK_S = 1.0  # between checks of a full batch: a trainer may be late
_NEWCOMERS_LOOK_S = 0.2  # the same, while the batch waits for newcomers only
_SOONEST_S = 0.01  # least time to the next wake-up, even if something is overdue
_NAMED_LATE = 3  # late trainers that are named


class Conductor:
    """The conductor of one run. Pass events to `handle` and time to `wake`; read answers from the views."""

    def __init__(self, config: ConductorConfig, rng: random.Random, now: float, origin: Origin | None = None) -> None:
        origin = origin or Origin()
        self._config = config
        self._versions = ReaderVersions()  # of what trainers see
        self.batches = Batches(config.stages, config.microbatches, self._versions, config.own_pace)
        self.counted_work = CountedWork(config.microbatch_samples)
        self.roster = Roster(config.stages, delayed=config.delayed)
        self.course = RunPhase(delayed=config.delayed)
        self.search = PositionSearch(config, origin, self.roster, self.course, now)
        self._batches_of: Position | None = None  # the position whose batch is being filled
        for post in origin.established:
            self.roster.note_helped(post)
        self._divergence = Divergence()
        self.search.barred = self._divergence.barred
        self._blame = Blame(config.ban_s, self.batches, self.roster, self.search.established, origin)
        self.resting = RestChoice(config, self.roster, self._pace)
        self._closing = StageClosing(config, self.batches, self.roster, self._blame, self.resting, rng)
        self.resting.begins = self.search.established.rest
        self.search.established.rest(origin.resting)
        if self.batches.trainers.own_pace:
            self.batches.trainers.resting = self.resting.peers
        self._step = StepCycle(config, self.batches, self.roster, self.course, self._closing, self.resting)
        prices = RebalanceConfig(config.work or (1.0,) * config.stages, config.move_price_s, config.least_gain)
        self.rebalancing = Rebalancing(prices, self.roster, origin.own, moves=config.moves, rests=self.resting)

    # --- what drives it ---------------------------------------------------------------------------------------

    def handle(self, now: float, event: Event) -> list[Output]:
        """Process one event; returns the outputs to carry out now."""
        match event:
            case MemberHello():
                self._hello(now, event)
            case MemberGone(peer):
                self._lose_mover(now, peer)
            case TrainerReport():
                self._report(now, event)
            case TrainerGone(peer):
                self.batches.trainers.gone(peer)
                self._step.look_again()
                self._versions.change_all()
            case PrepareEnded():
                self._closing.ended(now, event)
            case MoveEnded(peer, position, slow):
                self._move_ended(now, peer, position, slow)
            case TransferRefused(peer):
                self.rebalancing.refused(now, peer)
        return self._advance(now)

    def expect(self, peers: Iterable[str]) -> None:
        """Wait for these members, which are reported alive, before a new conductor decides on the position."""
        self.search.expect(peers)

    def unexpect(self, peer: str) -> None:
        """Stop waiting for a peer that cannot be reached."""
        self.search.unexpect(peer)

    def saved(self, peer: str, positions: Iterable[Position]) -> None:
        """Record the checkpoints that a member has now."""
        self.roster.note_saved(peer, positions)

    def said_of_line(self, now: float, peer: str, stage: int, line: LineInfo, addrs: tuple[str, ...] = ()) -> None:
        """Record the line rates that a member, or a helper of `stage`, reports. Ignored if the peer is kept out."""
        if not self._blame.keeps_out(now, peer):
            self.roster.note_line(peer, stage, line, addrs)

    def wake(self, now: float) -> list[Output]:
        """Act on deadlines that have passed; returns the outputs to carry out now."""
        return self._advance(now)

    def wake_at(self, now: float) -> float:
        """Time by which `wake` must be called."""
        due = min(now + _IDLE_S, self.search.due(now), self._step.move_due())
        if self.phase in (Phase.OPEN, Phase.CLOSING) and (close_due := self._step.close_due(now)) is not None:
            due = min(due, close_due)
        if self.phase is Phase.OPEN and self.batches.due.full:
            waits = self.batches.trainers.newcomers.are_waited_for
            due = min(due, now + (_NEWCOMERS_LOOK_S if waits else _LATE_LOOK_S))
        return max(due, now + _SOONEST_S)

    # --- what others may see ----------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self.course.phase

    @property
    def current(self) -> Position | None:
        """Position that all members last had, or None if this conductor does not know it yet."""
        return self.course.current

    @property
    def settled(self) -> Position | None:
        """Position that every member should have, or None while members are moving."""
        return self.course.settled

    @property
    def lost(self) -> bool:
        """True if every stage has members but there is no common position to resume from."""
        return self.search.lost

    def version(self, trainer: str) -> int:
        """Version of the answers to this trainer; it increases when they change."""
        return self._versions.of(trainer)

    @property
    def members_version(self) -> int:
        """Version of the answers to members; it increases when they change."""
        return self.roster.version

    @property
    def listed_version(self) -> int:
        """Version of the member list alone; it changes less often than `members_version`."""
        return self.roster.listed

    def concerned(self) -> set[str] | None:
        """Trainers whose view has changed since the last call, or None for all trainers."""
        return self._versions.concerned()

    def is_member(self, peer: str, session: int) -> bool:
        return self.roster.session(peer) == session

    def knows(self, peer: str, position: Position) -> bool:
        """True if the roster has the member at this position."""
        return self.roster.entries[peer].position == position

    def members(self) -> list[MemberInfo]:
        """All live members, sorted by peer, followed by the helpers."""
        return self.roster.members(self._is_ready, self.resting)

    def admitted(self, trainer: str, early: bool = False) -> list[int]:
        """Numbers of the trainer's microbatches in this step's batch, or in the next one's if `early`."""
        return (self.batches.early if early else self.batches.due).of_trainer(trainer)

    def redo(self, trainer: str) -> list[Redo]:
        """Microbatches that the trainer has to compute again because a peer that held them is gone."""
        return self.batches.redo(trainer, self._closing.settled)

    def counted(self, trainer: str, step: int) -> list[int] | None:
        """Numbers of the trainer's microbatches that counted in `step`; empty if that step is not made yet.

        Returns None if the batch is no longer remembered.
        """
        return self.batches.counted.of(trainer, step) if self.current is not None and step < self.current.step else []

    def takes(self, step: int) -> bool:
        """True if reports on microbatches of `step` are accepted now; otherwise trainers have to repeat them later."""
        return self.current is not None and step == self.current.step and self.course.works

    def evaluates(self, trainer: str) -> bool:
        """True for the one trainer that evaluates: the alphabetically first one that does not rest."""
        return trainer == self.batches.trainers.first_at_work()

    def waits_for(self) -> str:
        """Reason that no microbatch is admitted, or the late trainers that the step waits for; "" if neither."""
        if blocked := self._blocked():
            return blocked
        if not self._step.late or self.phase is not Phase.OPEN:
            return ""
        late = [*self._step.late.items()][:_NAMED_LATE]
        return f"late trainers: {', '.join(f'…{peer[-8:]} ({count} microbatches unfinished)' for peer, count in late)}"

    def _is_ready(self, post: str, position: Position) -> bool:
        return self.course.serves(post, position) and post not in self.resting

    def _pace(self, post: str) -> float:
        """Measured microbatches per second of a post's device, or 0 if unknown."""
        if not self.batches.trainers.own_pace:
            return self.rebalancing.rate(post)
        seconds = self.batches.trainers.seconds(peer_of(post))
        return 1 / seconds if seconds else 0.0

    @property
    def _is_stopped(self) -> bool:
        return bool(self._divergence.stopped)

    def _blocked(self) -> str:
        """Reason that no microbatch is admitted, or "" if the step is open."""
        if self._is_stopped:
            return self._divergence.stopped
        if empty := self.roster.empty_stages():
            return f"stage {', '.join(map(str, empty))} has no peers"
        if self.phase is Phase.GATHERING:
            return self.search.problem()
        if self.phase is Phase.OPEN and (lagging := self.roster.lagging_stages(self.current)):
            return f"stage {', '.join(map(str, lagging))} has no peer with the current state"
        if problem := self._closing.problem():
            return problem
        return "the run is complete" if self.phase is Phase.COMPLETE else ""

    def awaited(self) -> set[str]:
        """Members that have not yet done what they were ordered to do: average, or move."""
        return self.course.moving or self._closing.awaited()

    def spares(self, now: float, member: str) -> bool:
        """True if the member's gradient is in a sum and others can compute the remaining microbatches."""
        entry = self.roster.entries.get(member)
        several = self._config.stages > 1  # in a single stage each trainer computes its own microbatches
        return several and entry is not None and member in self._closing.spared(now, entry.stage)

    def keeps_out(self, now: float, peer: str) -> str:
        """Reason that a member or a helper is not admitted now, or "" if it is."""
        return self._blame.why_out(now, peer)

    def holds_back(self, now: float, trainer: str) -> str:
        """Reason, in the trainer's own behavior, that it gets no microbatch now; "" if there is none."""
        return self.batches.trainers.why_nothing(now, trainer)

    def whole_in_s(self, now: float) -> float | None:
        """Seconds until the batch is complete, or None if unknown or if the step is blocked."""
        if self.phase is Phase.OPEN and not self._blocked():
            return self.batches.whole_in_s(now)
        return 0.0 if self.phase in (Phase.CLOSING, Phase.MOVING) else None

    # --- members and trainers ---------------------------------------------------------------------------------

    def _hello(self, now: float, hello: MemberHello) -> None:
        peer, known = hello.peer, self.roster.entries.get(hello.peer)
        if not 0 <= hello.stage < self._config.stages or self._blame.keeps_out(now, peer):
            return
        if not self.roster.has_room(peer):
            return
        self._blame.let_in(now, peer)
        if known is not None and (known.session != hello.session or known.stage != hello.stage):
            self._lose_mover(now, peer)
        if known is None:
            self._divergence.member_came()
        entry = self.roster.enter(hello)
        due, early = frozenset[Mb](), frozenset[Mb]()
        if self.phase in (Phase.OPEN, Phase.CLOSING):
            self._step.out += self.resting.came(now, peer, self.current)
        if peer in self.resting:
            pass  # others compute its microbatches again
        elif hello.position == self.current:
            due, early = entry.held, entry.early
        elif self.course.commits and hello.position == self.course.target:
            early = entry.held
        self.batches.told(now, (peer, hello.stage, hello.session), due, early)
        if self.phase is Phase.GATHERING:
            self.search.heard(now, peer)
        elif self.search.is_ahead(peer):
            self._gather_anew(now, "members have a newer position than this conductor knew of")
        self._versions.change_all()

    def _move_ended(self, now: float, peer: str, position: Position | None, slow: bool) -> None:
        if peer not in self.course.moving:
            return
        if position is None or position != self.course.target:
            self._lose_mover(now, peer, slow=slow)
            return
        self.course.moving.discard(peer)
        self.search.failed_moves.arrived(peer)
        entry = self.roster.entries[peer]
        if self.course.commits:
            self._step.moved(now, peer)
            self._blame.helped(peer)
            self.search.established.add(peer, entry.stage, position.step)
            self.roster.note_helped(peer)
        self.roster.move(peer, position, stepped=self.course.commits)

    def _lose_mover(self, now: float, peer: str, *, slow: bool = False) -> None:
        """Remove a member that is gone or did not reach the position that it was ordered to."""
        if peer in self.course.moving and not self.course.commits:
            self.search.failed_moves.failed(now, peer, slow=slow and peer in self.search.established)
        self._step.lose(now, peer)

    def _report(self, now: float, report: TrainerReport) -> None:
        self.batches.trainers.report(report.peer, report.open, report.early, report.step + 1)
        if self.takes(report.step):
            self._step.report(now, report)
            self._divergence.dropped(report.peer, self.batches.not_finite)
            trainers = self.batches.trainers.experienced
            if self.phase is Phase.OPEN and self._divergence.has_come(self.batches.due, trainers):
                self._go_back(now)

    def _go_back(self, now: float) -> None:
        """Handle divergence: return to the newest earlier position that all stages can reach, or stop the run."""
        assert self.current is not None
        told = self._divergence.judge(self.current)
        self._versions.change_all()
        if self._divergence.stopped:
            self._step.out.append(Note(told, warning=True))
        else:
            self._gather_anew(now, told, warning=True)

    # --- phases -----------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Output]:
        """Run the logic of every phase, in an order in which one phase may lead to the next. Returns the outputs."""
        course = self.course
        self.search.look(now)
        if course.phase is Phase.GATHERING and self.search.is_over(now):
            self._decide_position(now)
        self._step.leave_late(now)
        if course.phase is Phase.MOVING and not course.moving:
            self._arrive(now)
        if course.phase in (Phase.OPEN, Phase.CLOSING) and self.search.falls_back(now):
            self._gather_anew(now, "a stage has lost the current state: looking for an older common position")
        if course.phase in (Phase.OPEN, Phase.CLOSING):
            self._step.watch(now)
            self._step.drop_dead(now)
        if course.phase is Phase.OPEN and not self.roster.lagging_stages(course.current) and not self._is_stopped:
            self._step.fill(now)
        if course.phase is Phase.CLOSING:
            self._step.close(now)
            if course.commits:  # a member that is lost from now on keeps its credit
                self.counted_work.batch_closed(self.batches.due.credit(), self.batches.due.by_trainer)
        self._step.let_go(now)
        self._step.fill_early(now)
        if self.search.look_lost(now):
            self.roster.change()
        if self._closing.changed:
            self._closing.changed = False
            self._versions.change_all()
        return self._step.take()

    def _gather_anew(self, now: float, why: str, warning: bool = False) -> None:
        """Start gathering again: nothing is certain except what the members report."""
        self._step.out.append(Note(why, warning=warning))
        self._step.reopen(now)
        self._closing.renew(now)
        self.resting.restart()
        self.course.gather()
        self.search.begin(now)

    def _decide_position(self, now: float) -> None:
        """End gathering: order all members to the position to resume from, if there is one."""
        target = self.search.decide(now)
        if target is None:
            return
        if target != self._batches_of:
            self._batches_of = target
            self.batches.go_to(target.step, self.roster.batch_before(target, self.search.established))
        loss = self.search.loss(target)
        moves = self.search.moves(target)
        self.course.move(target, (order.peer for order in moves), commits=False)
        self._step.out += [*moves, Note(loss or f"the swarm is at step {target.step}", warning=bool(loss))]

    def _arrive(self, now: float) -> None:
        """End a move: every member that could has reached the target."""
        target, stepped = self.course.target, self.course.commits
        assert target is not None
        done = self.batches.due.credit()
        if stepped and all(self.roster.at(stage, target) for stage in self.roster.stages):  # otherwise no step was made
            self.counted_work.step_made(target.step)
        if target != self.current:
            self.batches.step_made(target.step - 1)
        self._batches_of = target
        self.course.arrive(self._config.total_steps)
        self.search.arrived(target)
        self._divergence.arrived()
        self._closing.renew(now)
        if stepped:
            self.search.established.step_made(target.step)
            self._step.step_made(now, target)
        if not stepped or self.phase is Phase.COMPLETE:
            self.resting.restart()
        members = sorted(self.roster.entries.items())
        for peer, entry in members:
            if peer in self.resting:
                self.batches.rest(peer, now)
            elif entry.position != target:
                self.batches.lose(peer, now)
        if not stepped:  # after a step, trainers and the conductor know more than the members' hellos
            self.batches.adopt(now, {peer: entry for peer, entry in members if entry.position == target})
            self.rebalancing.restart()
        else:
            there = [peer for peer, entry in members if entry.position == target and peer not in self.resting]
            self._step.out += self.rebalancing.step_made(now, done, there)
        self._versions.change_all()
        self.roster.change()
