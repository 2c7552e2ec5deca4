"""The batches that trainers fill: which trainers may add to them, what is done, and what must be repeated.

`due` is the batch of the current step. In a delayed run `early`, the batch of the next step, is filled once `due` has
no room, and becomes `due` when the step is made. So its microbatches are computed with parameters that are one step
old, never older. Pure bookkeeping for the conductor, which knows the phase and the serving members, and learns here
whether `due` shrank. `BatchLedger.complete` says when a batch is complete. Invariants (`check`): a microbatch has at
most one slot in one batch, and none that a step has counted gets another. A hostile trainer can name anything: only its
own microbatches are affected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import zip_longest
from typing import NamedTuple

from peerd.core.limits import REDO_AT_ONCE
from peerd.messages.swarm import Done, Mb, Redo
from peerd.swarm.batch.admission import Admission
from peerd.swarm.batch.batch_ledger import BatchLedger, Counted
from peerd.swarm.batch.lateness import Lateness
from peerd.swarm.events import TrainerReport, Verify
from peerd.swarm.posts import peer_of
from peerd.swarm.reader_versions import ReaderVersions
from peerd.swarm.roster import RosterEntry

_SHED_AT_ONCE = 128  # entries of a finished batch freed with each report, as freeing all at once causes delays


class StageView(NamedTuple):
    """The conductor's view of the stages: which peers can hold microbatches, and which stages have their mean."""

    serves: Callable[[str, int], bool]  # does this peer have the state of this stage that microbatches need?
    settled: Sequence[bool]  # by stage


class Batches:
    """A run's current and next batch. Each has `microbatches` microbatches, which pass through all `stages` stages."""

    def __init__(self, stages: int, microbatches: int, versions: ReaderVersions, own_pace: bool | None = None) -> None:
        """`own_pace`: each trainer computes at the speed of its own machine. Default: True if there is one stage."""
        self._stages = range(stages)
        self._nothing = [False] * stages  # `settled` of the early batch
        self.due, self.early = BatchLedger(stages, microbatches), BatchLedger(stages, microbatches)
        self.counted = Counted()
        self._versions = versions  # of what trainers see
        self.trainers = Admission(own_pace=stages == 1 if own_pace is None else own_pace)
        self.verify: Verify | None = None  # verifies receipts
        self.tell: Callable[[str], None] = lambda text: None  # receives texts for the log
        self.not_finite = 0  # microbatches of `due` that the last report dropped as not finite
        self._over: BatchLedger | None = None  # what is left of the last batch
        self._void: set[Mb] = set()  # dropped for good: later reports on them are ignored

    # --- members ----------------------------------------------------------------------------------------------

    def lose(self, peer: str, now: float) -> None:
        """Record that everything that `peer` held is lost."""
        self.due.lose(peer, now)
        self.early.lose(peer, now)

    def rest(self, peer: str, now: float) -> None:
        """Record that `peer` (a post) rests: neither its gradients nor its own trainer's microbatches count now."""
        self.lose(peer, now)
        if self.trainers.own_pace:
            trainer = peer_of(peer)
            self.void([Mb(trainer, seq) for ledger in (self.due, self.early) for seq in ledger.of_trainer(trainer)])

    def told(self, now: float, who: tuple[str, int, int], due: frozenset[Mb], early: frozenset[Mb]) -> None:
        """Apply a report of what a member (peer, stage, session) holds: anything else that was credited to it is lost.

        The member itself was not lost: only its connection had broken.
        """
        peer, stage, session = who
        for ledger, held in ((self.due, due), (self.early, early)):
            ledger.keep_only(peer, stage, held, now)
            for mb in sorted(mb for mb in held if ledger.lacks(mb, stage)):
                ledger.hold(mb, stage, peer, session)

    def adopt(self, now: float, members: Mapping[str, RosterEntry]) -> None:
        """Count the microbatches that the members, all of them at the current step, already hold in every stage."""
        stages = [{peer: m for peer, m in members.items() if m.stage == stage} for stage in self._stages]
        sessions = {peer: m.session for peer, m in members.items()}
        self._adopt(now, self.due, [{peer: m.held for peer, m in stage.items()} for stage in stages], sessions)
        self._adopt(now, self.early, [{peer: m.early for peer, m in stage.items()} for stage in stages], sessions)

    def _adopt(
        self, now: float, ledger: BatchLedger, stages: list[dict[str, frozenset[Mb]]], sessions: Mapping[str, int]
    ) -> None:
        for mb in [mb for held in stages[0].values() for mb in sorted(held)]:
            holders = [next((peer for peer, held in stage.items() if mb in held), None) for stage in stages]
            if all(holders) and not self._has_place(mb) and ledger.admit(mb, now):
                ledger.finish(mb)
                for stage, peer in enumerate(holders):
                    ledger.hold(mb, stage, peer or "", sessions[peer or ""])

    # --- trainers ---------------------------------------------------------------------------------------------

    def take(self, now: float, report: TrainerReport, view: StageView, delayed: bool) -> bool:
        """Process a trainer's report. True if `due` shrank, which cannot happen once all its stages are settled."""
        if self._over is not None and not self._over.shed(_SHED_AT_ONCE):
            self._over = None
        bound, shrank = frozenset(report.early), False
        for done in report.done:
            mb = Mb(report.peer, done.seq)
            if mb in self.early.entries or (done.seq in bound and mb not in self.due.entries):
                if delayed:
                    early = StageView(view.serves, self._nothing)
                    shrank |= self._take_done(now, (self.early, report.step + 1), mb, done, early)
            else:
                shrank |= self._take_done(now, (self.due, report.step), mb, done, view)
        gone = self._given_up(self.due, report, view.settled)
        cannot = frozenset(report.unknown)
        self.not_finite = sum(mb.seq in cannot and not self.due.entries[mb].done for mb in gone)
        self._drop(self.due, gone)
        if self.early.open:
            self._drop(self.early, self._given_up(self.early, report, self._nothing))
        return bool(gone) or shrank

    def _given_up(self, ledger: BatchLedger, report: TrainerReport, settled: Sequence[bool]) -> list[Mb]:
        """A trainer's microbatches that it never finished and no longer names, or that it cannot repeat."""
        waiting = ledger.open.get(report.peer)
        if not waiting or all(settled):
            return []
        begun, unknown = {*report.open, *(done.seq for done in report.done)}, frozenset(report.unknown)
        if not unknown and waiting.keys() <= begun:  # most reports
            return []
        return [
            mb
            for mb, entry in ((Mb(report.peer, seq), entry) for seq, entry in waiting.items())
            if (mb.seq in unknown and ledger.is_missing(mb, settled) if entry.done else mb.seq not in begun)
        ]

    def _take_done(self, now: float, of: tuple[BatchLedger, int], mb: Mb, done: Done, view: StageView) -> bool:
        """Record a finished microbatch. `of`: its batch and that batch's step. True if `due` shrank."""
        ledger, step = of
        if len(done.holders) != len(self._stages) or mb in self.counted or mb in self._void:
            return False
        if mb.trainer in self.trainers.newcomers and not self._shows(step, mb, done):
            self.strike(now, mb.trainer, proven=True)
            ledger.newcomers -= mb in ledger.entries  # no time was lost: another newcomer may have this slot
            self.tell(f"trainer …{mb.trainer[-8:]} is new and has no valid receipts: it gets fewer microbatches")
            return self.void([mb])
        if not ledger.admit(mb, now):
            return False
        entry = ledger.entries[mb]
        if not entry.done:
            self.trainers.finished(now, mb.trainer, entry.since)
        ledger.finish(mb)
        for stage, (holder, receipt) in enumerate(zip_longest(done.holders, done.receipts[: len(done.holders)])):
            if view.settled[stage]:
                continue
            if view.serves(holder, stage):
                ledger.hold(mb, stage, holder, receipt)
            elif not view.serves(entry.holders[stage], stage):  # otherwise the earlier holder still has it
                ledger.unhold(mb, stage, now)
        return False

    def _shows(self, step: int, mb: Mb, done: Done) -> bool:
        """True if the holders' receipts confirm the trainer's report. Only required of newcomers."""
        if self.verify is None:
            return True
        return all(
            receipt is not None and self.verify(holder, stage, step, mb, receipt)
            for stage, (holder, receipt) in enumerate(zip_longest(done.holders, done.receipts[: len(done.holders)]))
        )

    def drop_dead(
        self, now: float, settled: Sequence[bool], lease_s: tuple[float, float]
    ) -> tuple[bool, dict[str, int]]:
        """Drop microbatches that nobody can finish: their trainer is gone, or took far too long.

        Returns whether `due` shrank, and the number that each connected trainer did not finish; these trainers get
        fewer.
        """

        lateness = self.trainers.lateness(now, lease_s, alone=self.due.full)
        due = self._dead(self.due, settled, lateness)
        of_early = self.trainers.lateness(now, lease_s, alone=self.due.full, early=True)
        early = self._dead(self.early, self._nothing, of_early)
        late = Counter(mb.trainer for mb in (*due, *early) if mb.trainer in self.trainers)
        if any(trainer not in self.trainers.newcomers for trainer in late):  # newcomers say nothing about the others
            self.trainers.ran_out(now)
        for trainer in sorted(late):
            self.strike(now, trainer)
        self._drop(self.due, due)
        self._drop(self.early, early)
        return bool(due), dict(late)

    def _dead(self, ledger: BatchLedger, settled: Sequence[bool], lateness: Lateness) -> list[Mb]:
        """The microbatches of a batch that nobody can finish, sorted."""
        found = list[Mb]()
        for trainer in self.trainers.absent(ledger.open.keys()):
            found += [mb for mb in ledger.open_of(trainer) if ledger.is_missing(mb, settled)]
        for trainer in ledger.waiting_since(lateness.since):
            if trainer in self.trainers:
                found += self._late(ledger, settled, lateness, trainer)
        return sorted(found)

    def _late(self, ledger: BatchLedger, settled: Sequence[bool], lateness: Lateness, trainer: str) -> list[Mb]:
        """A trainer's overdue microbatches that a stage still needs, oldest first."""
        found = list[Mb]()
        for seq, entry in ledger.open.get(trainer, {}).items():
            if not lateness.is_overdue(trainer, entry.since):
                break
            if ledger.is_missing(mb := Mb(trainer, seq), settled):
                found.append(mb)
        return found

    def late(self, now: float, settled: Sequence[bool], lease_s: tuple[float, float]) -> dict[str, int]:
        """Trainers that hold up the full batch beyond their leases, with the number of their overdue microbatches."""
        if not self.due.full:
            return {}
        lateness = self.trainers.lateness(now, lease_s, alone=True)
        suspects = self.trainers.absent(self.due.open.keys()).union(self.due.waiting_since(lateness.since))
        late = {name: len(self._late(self.due, settled, lateness, name)) for name in sorted(suspects)}
        return {name: count for name, count in late.items() if count}

    def strike(self, now: float, trainer: str, *, proven: bool = False) -> int:
        """Record that the trainer held up the step, so that it gets fewer microbatches. Returns its number of strikes.

        `proven`: as in `Probation.failed`.
        """
        under_way = self.due.under_way[trainer] + self.early.under_way[trainer]
        return self.trainers.strike(now, trainer, under_way, proven=proven)

    def void(self, mbs: Iterable[Mb]) -> bool:
        """Drop these microbatches for good, whatever is reported of them later. True if `due` shrank."""
        shrank = False
        for mb in mbs:
            shrank |= mb in self.due.entries
            self.due.drop(mb)
            self.early.drop(mb)
            self._void.add(mb)
            self._versions.change(mb.trainer)
            self.trainers.wish_again([mb.trainer])
        return shrank

    def _drop(self, ledger: BatchLedger, gone: Iterable[Mb]) -> None:
        for mb in gone:
            ledger.drop(mb)
            ledger.given_back[mb.trainer] += 1
            self._versions.change(mb.trainer)
            self.trainers.wish_again([mb.trainer])

    def fill(self, now: float, step: int, early: bool, summed: Set[str] = frozenset()) -> None:
        """Admit what trainers request while there is room, to `due` (the batch of `step`) or, if `early`, to the next
        one.

        `summed`: as in `Admission.wishes`.
        """
        ledger, beside = (self.early, self.due) if early else (self.due, self.early)
        for mb in self.trainers.wishes(now, ledger, self.counted, beside, step + early, summed):
            if ledger.admit(mb, now):
                self._versions.change(mb.trainer)

    def whole_in_s(self, now: float) -> float | None:
        """Seconds until the batch is complete, or None if unknown."""
        return self.trainers.whole_in_s(now, self.due)

    def redo(self, trainer: str, settled: Sequence[bool]) -> list[Redo]:
        """Microbatches that the trainer has to repeat because their holder is gone, at most REDO_AT_ONCE."""
        return (self.due.redo(trainer, settled) + self.early.redo(trainer, self._nothing))[:REDO_AT_ONCE]

    def _has_place(self, mb: Mb) -> bool:
        return mb in self.due.entries or mb in self.early.entries or mb in self.counted

    # --- steps ------------------------------------------------------------------------------------------------

    def step_made(self, step: int) -> None:
        """Record that the batch of `step`, if known, was averaged and counted; the early one takes its place."""
        if self.due.entries:
            self.counted.add(step, self.due.by_trainer)
        self.trainers.step_made(sorted(self.due.by_trainer))
        self.trainers.wish_again()
        self._void.clear()
        self._over = self.due
        self.due, self.early = self.early, BatchLedger(len(self._stages), self.due.capacity)

    def go_to(self, step: int, batch_before: Iterable[Mb]) -> None:
        """Continue at `step`, which the swarm reached by recovery, not by a step. `batch_before` led there."""
        self.due.clear()
        self.early.clear()
        self._void.clear()
        self.counted.restart(step - 1, batch_before)
        self.trainers.wish_again()
        self._versions.change_all()

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        self.due.check()
        self.early.check()
        assert not self.due.entries.keys() & self.early.entries.keys()
        assert not any(mb in self.counted for ledger in (self.due, self.early) for mb in ledger.entries)
