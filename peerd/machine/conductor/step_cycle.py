"""The cycle of a step: microbatches are admitted, every stage averages (`StageClosing`), all members commit.

OPEN: trainers' microbatches fill the batch; those whose lease ends go to others. CLOSING: each stage that has its part
of all of them averages; when the batch shrinks, every mean is forgotten and the step is OPEN again. With the last mean,
all members are sent to the next position, and the phase is MOVING. In a delayed run the next batch is filled meanwhile.
Decides only; the conductor calls each in its phase, and hands out the outputs (`take`).
"""

from __future__ import annotations

import math

from peerd.core.messages.swarm import Position
from peerd.machine.batch.batches import Batches, StageView
from peerd.machine.conductor.resting import RestChoice
from peerd.machine.conductor.stage_close import StageClosing
from peerd.machine.positions.phases import Phase, RunPhase
from peerd.machine.swarm.events import ConductorConfig, Note, Output, SendMove, TrainerReport
from peerd.machine.swarm.late_movers import LateMovers
from peerd.machine.swarm.latecomers import Latecomers
from peerd.machine.swarm.posts import peer_of
from peerd.machine.swarm.roster import Roster

_LATE_PARTS = 3  # a trainer is named as late when one of so many parts of its lease is over
_FEW = 8  # trainers at work that are looked at with each event; more than these now and then,
_LOOK_S = 0.1
_AT_ONCE = 4096  # microbatches in the stages that begin to average in one turn: others have to be heard, too


class StepCycle:
    """See the module's header. One conductor's; `closing` averages for it."""

    def __init__(
        self,
        config: ConductorConfig,
        batches: Batches,
        roster: Roster,
        course: RunPhase,
        closing: StageClosing,
        resting: RestChoice,
    ) -> None:
        self._config, self._batches, self._roster = config, batches, roster
        self._course, self._closing, self._blame = course, closing, closing.blame
        self._resting = resting
        self._latecomers, self._late_movers = Latecomers(roster), LateMovers()
        self._leases_s = config.lease_s, config.first_lease_s
        self.late: dict[str, int] = {}  # trainer that the step waits for -> number of its microbatches
        self.out: list[Output] = []  # beside those of averaging
        self._look_at = 0.0  # the next look at leases
        self._more_to_begin = False  # stages could begin to average, in the next turn

    def take(self) -> list[Output]:
        """The outputs to carry out now, in order; each is returned once."""
        out, self.out = self._closing.take() + self.out, []
        return out

    # --- open -------------------------------------------------------------------------------------------------

    def report(self, now: float, report: TrainerReport) -> None:
        """Take a trainer's report on the step under way."""
        view = StageView(self.serves, self._closing.settled)
        if self._batches.take(now, report, view, self._config.delayed):
            self.reopen(now)

    def look_again(self) -> None:
        """A trainer is gone: leases are looked at with the next event."""
        self._look_at = 0.0

    def drop_dead(self, now: float) -> None:
        """End leases that ran out: their microbatches go to other trainers."""
        if now < self._look_at:
            return
        self._batches.trainers.look_for_waits(now, self._batches.due)
        if not self._batches.due.open and not self._batches.early.open:
            self.late = {}
            return
        if len(self._batches.due.open) + len(self._batches.early.open) > _FEW:
            self._look_at = now + _LOOK_S
        settled = self._closing.settled
        lease_s, first_lease_s = self._leases_s
        self.late = self._batches.late(now, settled, (lease_s / _LATE_PARTS, first_lease_s / _LATE_PARTS))
        shrank, late = self._batches.drop_dead(now, settled, self._leases_s)
        for trainer, count in late.items():
            told = f"trainer …{trainer[-8:]} does not finish {count} microbatches that it was given"
            alone = self._batches.trainers.count() == 1
            then = "they are given out anew" if alone else "others do them, and it is given less"
            self.out.append(Note(f"{told}: {then}"))
        if shrank:
            self.reopen(now)

    def fill(self, now: float) -> None:
        """Admit microbatches; with the last of them done, the step closes."""
        step = self._course.step
        self._batches.fill(now, step, early=False, summed=self._spared(now))
        if self._batches.due.complete([False] * self._config.stages):
            self._course.close(self._closing.start(step))
            self._resting.filled(now)
            self._roster.change(listed=False)

    def _spared(self, now: float) -> set[str]:
        """Trainers of a run of one stage, where each computes for itself, that are spared what is still to be done."""
        return {peer_of(post) for post in self._closing.spared(now, 0)} if self._config.stages == 1 else set()

    def watch(self, now: float) -> None:
        """Act on deadlines of attempts, which go on while a batch that has shrunk is filled again."""
        self._closing.look(now)

    def fill_early(self, now: float) -> None:
        """In a delayed run, admit microbatches into the next batch once this one is full, if another step follows."""
        if not self._config.delayed or not self._course.works or not self._batches.due.full:
            return
        stages, step = range(self._config.stages), self._course.step
        served = all(any(self.serves(peer, stage) for peer in self._roster.of_stage(stage)) for stage in stages)
        if served and step + 1 != self._config.total_steps:
            self._batches.fill(now, step, early=True)

    def serves(self, peer: str, stage: int) -> bool:
        """True when the peer can take microbatches of this step, or of the next one, in this stage."""
        entry = self._roster.entries.get(peer)
        if entry is None or entry.stage != stage or peer in self._resting:
            return False
        return self._course.serves(peer, entry.position)

    # --- closing ----------------------------------------------------------------------------------------------

    def close(self, now: float) -> None:
        """Begin averaging in every stage that has its whole part of the batch; with the last mean, all commit."""
        self.let_go(now)
        due, target, begun = self._batches.due, self._course.target, 0
        self._more_to_begin = False
        if self._course.phase is not Phase.CLOSING or target is None or not due.full:
            return
        for stage in range(self._config.stages):
            if not self._closing.may_begin(now, stage):
                continue
            if self._latecomers.awaits(now, stage, self._course.current):
                continue
            if group := self._resting.at_work(stage, self._course.current):
                self._more_to_begin = begun >= _AT_ONCE
                if self._more_to_begin:
                    break
                if self._closing.begin(now, stage, tuple(group), target.lineage):
                    begun += len(due.entries)
        if all(self._closing.settled):
            movers = self._closing.prepared()
            self._course.move(target, movers, commits=True)
            self._late_movers.begin(now, ((peer, self._roster.entries[peer].stage) for peer in movers))
            self.out += [SendMove(peer, target, commit=True) for peer in movers]

    def close_due(self, now: float) -> float | None:
        """The next deadline while the step closes, where nothing is reported before; None: there is none."""
        if self._more_to_begin:
            return now
        return min((at for at in (self._closing.due(now), self._latecomers.due(now)) if at is not None), default=None)

    def moved(self, now: float, peer: str) -> None:
        """A member has made the step."""
        self._late_movers.arrived(now, peer)

    def leave_late(self, now: float) -> None:
        """Go on without the members that do not say that they made a step which the others have made."""
        if self._course.commits:
            for peer in self._late_movers.late(now, self._course.moving):
                self.out.append(Note(f"peer …{peer[-8:]} has not said that it made the step: the others go on"))
                self.lose(now, peer)

    def move_due(self) -> float:
        """Returns the next deadline while members make a step; infinite if nothing is due."""
        return self._late_movers.due(self._course.moving) if self._course.commits else math.inf

    def step_made(self, now: float, current: Position) -> None:
        """A step was made, and led to `current`."""
        self._closing.step_made(current.step)
        self.out += self._resting.step_made(now, current)
        if self._config.delayed or self._config.filled_at_once:  # else the next batch takes its time to fill
            self._latecomers.arrived(now, current)

    def reopen(self, now: float) -> None:
        """Forget the means of a step that closes, and sums with microbatches that are gone: the batch is not whole."""
        if self._course.phase in (Phase.OPEN, Phase.CLOSING):
            self._closing.reopen(now)
        if self._course.phase is Phase.CLOSING:
            self._closing.changed = True
            self._course.reopen()

    def let_go(self, now: float) -> None:
        """Drop the members that stood in the way, and what they took out of the batch with them."""
        while self._blame.aside or self._blame.shrank:
            aside, self._blame.aside = self._blame.aside, []
            for found in aside:
                self.lose(now, found.peer)
            if self._blame.shrank:
                self._blame.shrank = False
                self.reopen(now)

    def lose(self, now: float, peer: str) -> None:
        """Remove a member, or a helper, with the microbatches it held, its part in averaging and its move."""
        entry = self._roster.remove(peer)
        if entry is not None:
            self._batches.lose(peer, now)
        if self._course.phase in (Phase.OPEN, Phase.CLOSING):  # else stages have moved that would lose their sums
            self._closing.lost(now, peer)
        if entry is not None:
            self._resting.lost(peer, entry.stage, None if self._course.commits else self._course.current)
            self._course.moving.discard(peer)
            self._closing.changed = True
