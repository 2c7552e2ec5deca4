"""The cycle of a step: microbatches are admitted, every stage averages (`StageClosing`), all members commit.

OPEN: trainers' microbatches fill the batch; those whose lease expires are given to other trainers. CLOSING: each stage
that holds its part of all microbatches averages. If the batch shrinks, every mean is discarded and the step is OPEN
again. Once all stages have their mean, all members are ordered to the next position, and the phase is MOVING. In a
delayed run the next batch is filled meanwhile. Decides only; the conductor calls each method in its phase and collects
the outputs (`take`).
"""

from __future__ import annotations

import math

from peerd.messages.swarm import Position
from peerd.swarm.batch.batches import Batches, StageView
from peerd.swarm.events import ConductorConfig, Note, Output, SendMove, TrainerReport
from peerd.swarm.latecomers import Latecomers, LateMovers
from peerd.swarm.positions.phases import Phase, RunPhase
from peerd.swarm.posts import peer_of
from peerd.swarm.roster import Roster
from peerd.swarm.steps.rest_choice import RestChoice
from peerd.swarm.steps.stage_close import StageClosing

_LATE_PARTS = 3  # a trainer is reported as late after this fraction, 1 / _LATE_PARTS, of its lease
_FEW = 8  # with at most this many trainers at work, leases are checked at each event;
_LOOK_S = 0.1  # with more, at this interval
_AT_ONCE = 4096  # microbatches of the stages that begin to average in one turn, so that other events are not delayed


class StepCycle:
    """Leads the steps of one conductor through their phases; `closing` does the averaging."""

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
        self.out: list[Output] = []  # besides those of averaging
        self._look_at = 0.0  # the next check of leases
        self._more_to_begin = False  # more stages could begin to average in the next turn

    def take(self) -> list[Output]:
        """The outputs to carry out now, in order; each is returned once."""
        out, self.out = self._closing.take() + self.out, []
        return out

    # --- open -------------------------------------------------------------------------------------------------

    def report(self, now: float, report: TrainerReport) -> None:
        """Process a trainer's report on the current step."""
        view = StageView(self.serves, self._closing.settled)
        if self._batches.take(now, report, view, self._config.delayed):
            self.reopen(now)

    def look_again(self) -> None:
        """Check leases at the next event, because a trainer is gone."""
        self._look_at = 0.0

    def drop_dead(self, now: float) -> None:
        """Drop microbatches that trainers did not finish in time (their leases ran out), so that others get them."""
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
            told = f"trainer …{trainer[-8:]} did not finish {count} microbatches in time"
            alone = self._batches.trainers.count() == 1
            then = "they are assigned again" if alone else "other trainers get them, and it gets fewer"
            self.out.append(Note(f"{told}: {then}"))
        if shrank:
            self.reopen(now)

    def fill(self, now: float) -> None:
        """Admit microbatches. Once the last of them is done, the step closes."""
        step = self._course.step
        self._batches.fill(now, step, early=False, summed=self._spared(now))
        if self._batches.due.complete([False] * self._config.stages):
            self._course.close(self._closing.start(step))
            self._resting.filled(now)
            self._roster.change(listed=False)

    def _spared(self, now: float) -> set[str]:
        """Trainers exempt from the remaining microbatches, in a run of one stage, where each computes for itself."""
        return {peer_of(post) for post in self._closing.spared(now, 0)} if self._config.stages == 1 else set()

    def watch(self, now: float) -> None:
        """Act on deadlines of attempts, which continue while a batch that has shrunk is filled again."""
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
        """True if the peer can accept microbatches of this step, or of the next one, in this stage."""
        entry = self._roster.entries.get(peer)
        if entry is None or entry.stage != stage or peer in self._resting:
            return False
        return self._course.serves(peer, entry.position)

    # --- closing ----------------------------------------------------------------------------------------------

    def close(self, now: float) -> None:
        """Start averaging in every stage that holds its part of the complete batch. With the last mean, all commit."""
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
        """Next deadline while the step closes, if no report arrives earlier, or None if there is none."""
        if self._more_to_begin:
            return now
        return min((at for at in (self._closing.due(now), self._latecomers.due(now)) if at is not None), default=None)

    def moved(self, now: float, peer: str) -> None:
        """Record that a member has made the step."""
        self._late_movers.arrived(now, peer)

    def leave_late(self, now: float) -> None:
        """Continue without members that do not confirm a step which the others have made."""
        if self._course.commits:
            for peer in self._late_movers.late(now, self._course.moving):
                self.out.append(Note(f"peer …{peer[-8:]} has not confirmed the step: the others continue without it"))
                self.lose(now, peer)

    def move_due(self) -> float:
        """Next deadline while members make a step, or infinity if there is none."""
        return self._late_movers.due(self._course.moving) if self._course.commits else math.inf

    def step_made(self, now: float, current: Position) -> None:
        """Record a completed step, which led to `current`."""
        self._closing.step_made(current.step)
        self.out += self._resting.step_made(now, current)
        if self._config.delayed or self._config.filled_at_once:  # in other runs the next batch takes time to fill
            self._latecomers.arrived(now, current)

    def reopen(self, now: float) -> None:
        """Discard the means of a closing step, and sums with dropped microbatches: the batch is incomplete."""
        if self._course.phase in (Phase.OPEN, Phase.CLOSING):
            self._closing.reopen(now)
        if self._course.phase is Phase.CLOSING:
            self._closing.changed = True
            self._course.reopen()

    def let_go(self, now: float) -> None:
        """Remove the members that held up the step, and the microbatches that they held."""
        while self._blame.aside or self._blame.shrank:
            aside, self._blame.aside = self._blame.aside, []
            for found in aside:
                self.lose(now, found.peer)
            if self._blame.shrank:
                self._blame.shrank = False
                self.reopen(now)

    def lose(self, now: float, peer: str) -> None:
        """Remove a member or a helper, with the microbatches it held, its part in averaging, and its move."""
        entry = self._roster.remove(peer)
        if entry is not None:
            self._batches.lose(peer, now)
        if self._course.phase in (Phase.OPEN, Phase.CLOSING):  # in other phases members step with these sums
            self._closing.lost(now, peer)
        if entry is not None:
            self._resting.lost(peer, entry.stage, None if self._course.commits else self._course.current)
            self._course.moving.discard(peer)
            self._closing.changed = True
