"""The batches that trainers fill: which trainers may add to them, what is done, what must be done again.

`due` is the batch of the step under way. In a delayed run `early`, that of the step after it, is filled as soon as
there is no room in `due`, and becomes it when the step is made; then it is filled with parameters that are one step
old, and never older ones. Pure bookkeeping beneath the conductor, which knows the phase and the serving members, and is
told when `due` shrinks. Invariants (`check`): a microbatch has at most one place in one batch, and none that a step has
counted gets another. A hostile trainer can name what it likes: only its own microbatches are concerned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import zip_longest
from typing import NamedTuple

from peerd.core.limits import REDO_AT_ONCE
from peerd.core.messages.swarm import Done, Mb, Redo
from peerd.machine.batch.admission import Admission
from peerd.machine.batch.lateness import Lateness
from peerd.machine.batch.ledger import Counted, Ledger
from peerd.machine.swarm.events import TrainerReport, Verify
from peerd.machine.swarm.posts import peer_of
from peerd.machine.swarm.revisions import ReaderVersions
from peerd.machine.swarm.roster import RosterEntry

_SHED_AT_ONCE = 128  # microbatches of a batch that is over, with each report: all together they hold others up


class StageView(NamedTuple):
    """The conductor's view of the stages: which peers' reports hold, and which stages have their mean."""

    serves: Callable[[str, int], bool]  # does this peer hold the state of this stage that microbatches are for?
    settled: Sequence[bool]  # by stage


class Batches:
    """`microbatches` make a batch, each with a gradient in every one of `stages`."""

    def __init__(self, stages: int, microbatches: int, versions: ReaderVersions, own_pace: bool | None = None) -> None:
        """`own_pace`: trainers are as fast as their machines; None: where there is one stage."""
        self._stages = range(stages)
        self._nothing = [False] * stages  # of the early batch is settled
        self.due, self.early = Ledger(stages, microbatches), Ledger(stages, microbatches)
        self.counted = Counted()
        self._versions = versions  # of what trainers see
        self.trainers = Admission(own_pace=stages == 1 if own_pace is None else own_pace)
        self.verify: Verify | None = None  # looks at receipts
        self.tell: Callable[[str], None] = lambda text: None  # what a person may want to know
        self.not_finite = 0  # microbatches of `due` that the trainer of the last report has dropped
        self._over: Ledger | None = None  # what is left of the last batch
        self._void: set[Mb] = set()  # dropped for good: they do not count in the batches under way, whoever says so

    # --- members ----------------------------------------------------------------------------------------------

    def lose(self, peer: str, now: float) -> None:
        """Take note that all that `peer` held is lost."""
        self.due.lose(peer, now)
        self.early.lose(peer, now)

    def rest(self, peer: str, now: float) -> None:
        """Take note that `peer`, a post, contributes nothing for now: neither what it holds, nor its own trainer."""
        self.lose(peer, now)
        if self.trainers.own_pace:
            trainer = peer_of(peer)
            self.void([Mb(trainer, seq) for ledger in (self.due, self.early) for seq in ledger.of_trainer(trainer)])

    def told(self, now: float, who: tuple[str, int, int], due: frozenset[Mb], early: frozenset[Mb]) -> None:
        """Apply a report of what a member (peer, stage, session) holds: the rest that was credited to it is lost.

        Only its connection had broken.
        """
        peer, stage, session = who
        for ledger, held in ((self.due, due), (self.early, early)):
            ledger.keep_only(peer, stage, held, now)
            for mb in sorted(mb for mb in held if ledger.lacks(mb, stage)):
                ledger.hold(mb, stage, peer, session)

    def adopt(self, now: float, members: Mapping[str, RosterEntry]) -> None:
        """Count what members, all of them at the step under way, hold in every stage already."""
        stages = [{peer: m for peer, m in members.items() if m.stage == stage} for stage in self._stages]
        sessions = {peer: m.session for peer, m in members.items()}
        self._adopt(now, self.due, [{peer: m.held for peer, m in stage.items()} for stage in stages], sessions)
        self._adopt(now, self.early, [{peer: m.early for peer, m in stage.items()} for stage in stages], sessions)

    def _adopt(
        self, now: float, ledger: Ledger, stages: list[dict[str, frozenset[Mb]]], sessions: Mapping[str, int]
    ) -> None:
        for mb in [mb for held in stages[0].values() for mb in sorted(held)]:
            holders = [next((peer for peer, held in stage.items() if mb in held), None) for stage in stages]
            if all(holders) and not self._has_place(mb) and ledger.admit(mb, now):
                ledger.finish(mb)
                for stage, peer in enumerate(holders):
                    ledger.hold(mb, stage, peer or "", sessions[peer or ""])

    # --- trainers ---------------------------------------------------------------------------------------------

    def take(self, now: float, report: TrainerReport, view: StageView, delayed: bool) -> bool:
        """A trainer's news of the step; True when `due` shrank, which it does not once all its stages are settled."""
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

    def _given_up(self, ledger: Ledger, report: TrainerReport, settled: Sequence[bool]) -> list[Mb]:
        """A trainer's microbatches that it no longer names and never finished, or cannot do again."""
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

    def _take_done(self, now: float, of: tuple[Ledger, int], mb: Mb, done: Done, view: StageView) -> bool:
        """`of`: the batch, and its step. True when `due` shrank."""
        ledger, step = of
        if len(done.holders) != len(self._stages) or mb in self.counted or mb in self._void:
            return False
        if mb.trainer in self.trainers.newcomers and not self._shows(step, mb, done):
            self.strike(now, mb.trainer, proven=True)
            ledger.newcomers -= mb in ledger.entries  # nobody waited: another newcomer may have this place
            self.tell(f"trainer …{mb.trainer[-8:]} is new and credits peers without their receipts: it is given less")
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
            elif not view.serves(entry.holders[stage], stage):  # else that one still has it, whatever is said now
                ledger.unhold(mb, stage, now)
        return False

    def _shows(self, step: int, mb: Mb, done: Done) -> bool:
        """True when the holders' receipts bear out what the trainer says. Asked of newcomers: others have shown
        enough.
        """
        if self.verify is None:
            return True
        return all(
            receipt is not None and self.verify(holder, stage, step, mb, receipt)
            for stage, (holder, receipt) in enumerate(zip_longest(done.holders, done.receipts[: len(done.holders)]))
        )

    def drop_dead(
        self, now: float, settled: Sequence[bool], lease_s: tuple[float, float]
    ) -> tuple[bool, dict[str, int]]:
        """Let go of what nobody can finish: its trainer is gone, or it took far too long.

        Tells whether `due` shrank, and which trainers that are here did not finish how many: they are given less.
        """

        lateness = self.trainers.lateness(now, lease_s, alone=self.due.full)
        due = self._dead(self.due, settled, lateness)
        of_early = self.trainers.lateness(now, lease_s, alone=self.due.full, early=True)
        early = self._dead(self.early, self._nothing, of_early)
        late = Counter(mb.trainer for mb in (*due, *early) if mb.trainer in self.trainers)
        if any(trainer not in self.trainers.newcomers for trainer in late):  # what these do says nothing of the others
            self.trainers.ran_out(now)
        for trainer in sorted(late):
            self.strike(now, trainer)
        self._drop(self.due, due)
        self._drop(self.early, early)
        return bool(due), dict(late)

    def _dead(self, ledger: Ledger, settled: Sequence[bool], lateness: Lateness) -> list[Mb]:
        """The microbatches of a batch that nobody can finish, sorted."""
        found = list[Mb]()
        for trainer in self.trainers.absent(ledger.open.keys()):
            found += [mb for mb in ledger.open_of(trainer) if ledger.is_missing(mb, settled)]
        for trainer in ledger.waiting_since(lateness.since):
            if trainer in self.trainers:
                found += self._late(ledger, settled, lateness, trainer)
        return sorted(found)

    def _late(self, ledger: Ledger, settled: Sequence[bool], lateness: Lateness, trainer: str) -> list[Mb]:
        """A trainer's overdue microbatches that a stage still needs, the oldest first."""
        found = list[Mb]()
        for seq, entry in ledger.open.get(trainer, {}).items():
            if not lateness.is_overdue(trainer, entry.since):
                break
            if ledger.is_missing(mb := Mb(trainer, seq), settled):
                found.append(mb)
        return found

    def late(self, now: float, settled: Sequence[bool], lease_s: tuple[float, float]) -> dict[str, int]:
        """Trainers for which the step waits, for longer than for others, and the number of microbatches of each."""
        if not self.due.full:
            return {}
        lateness = self.trainers.lateness(now, lease_s, alone=True)
        suspects = self.trainers.absent(self.due.open.keys()).union(self.due.waiting_since(lateness.since))
        late = {name: len(self._late(self.due, settled, lateness, name)) for name in sorted(suspects)}
        return {name: count for name, count in late.items() if count}

    def strike(self, now: float, trainer: str, *, proven: bool = False) -> int:
        """The trainer stood in the way of the step: it gets less than it has under way; how often by now.

        `proven`: as in `Probation.failed`.
        """
        under_way = self.due.under_way[trainer] + self.early.under_way[trainer]
        return self.trainers.strike(now, trainer, under_way, proven=proven)

    def void(self, mbs: Iterable[Mb]) -> bool:
        """These do not count, whatever is said of them later; True: `due` shrank."""
        shrank = False
        for mb in mbs:
            shrank |= mb in self.due.entries
            self.due.drop(mb)
            self.early.drop(mb)
            self._void.add(mb)
            self._versions.change(mb.trainer)
            self.trainers.wish_again([mb.trainer])
        return shrank

    def _drop(self, ledger: Ledger, gone: Iterable[Mb]) -> None:
        for mb in gone:
            ledger.drop(mb)
            ledger.given_back[mb.trainer] += 1
            self._versions.change(mb.trainer)
            self.trainers.wish_again([mb.trainer])

    def fill(self, now: float, step: int, early: bool, summed: Set[str] = frozenset()) -> None:
        """Admit what trainers wish for while there is room, to `due`, which is `step`'s, or to the batch after it.

        `summed`: as in `Admission.wishes`.
        """
        ledger, beside = (self.early, self.due) if early else (self.due, self.early)
        for mb in self.trainers.wishes(now, ledger, self.counted, beside, step + early, summed):
            if ledger.admit(mb, now):
                self._versions.change(mb.trainer)

    def whole_in_s(self, now: float) -> float | None:
        """Seconds until the batch is whole; None: nobody knows."""
        return self.trainers.whole_in_s(now, self.due)

    def redo(self, trainer: str, settled: Sequence[bool]) -> list[Redo]:
        """Microbatches that the trainer has to repeat, because the peer that held them is gone; of very many
        the first.
        """
        return (self.due.redo(trainer, settled) + self.early.redo(trainer, self._nothing))[:REDO_AT_ONCE]

    def _has_place(self, mb: Mb) -> bool:
        return mb in self.due.entries or mb in self.early.entries or mb in self.counted

    # --- steps ------------------------------------------------------------------------------------------------

    def step_made(self, step: int) -> None:
        """The batch of `step`, if it is known, has been averaged and counted: the early one takes its place."""
        if self.due.entries:
            self.counted.add(step, self.due.by_trainer)
        self.trainers.step_made(sorted(self.due.by_trainer))
        self.trainers.wish_again()
        self._void.clear()
        self._over = self.due
        self.due, self.early = self.early, Ledger(len(self._stages), self.due.capacity)

    def go_to(self, step: int, batch_before: Iterable[Mb]) -> None:
        """The swarm stands at `step` now, by another way than a step from here; this batch led there."""
        self.due.clear()
        self.early.clear()
        self._void.clear()
        self.counted.restart(step - 1, batch_before)
        self.trainers.wish_again()
        self._versions.change_all()

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.due.check()
        self.early.check()
        assert not self.due.entries.keys() & self.early.entries.keys()
        assert not any(mb in self.counted for ledger in (self.due, self.early) for mb in ledger.entries)
