"""The batch of the step under way as trainers fill it: who may add to it, what is done, what must be done again.

Pure bookkeeping beneath the conductor, which knows the phase and who serves, and is told when the batch shrinks.
Invariants (`check`): a microbatch has at most one place, and none that a step has counted gets another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from peerd.core.training import Mb, Redo
from peerd.machine.admission import Admission
from peerd.machine.conducting import TrainerReport
from peerd.machine.ledger import Counted, Entry, Ledger

Serves = Callable[[str, int], bool]  # does this peer hold the current state of this stage?


class Batches:
    """`microbatches` make a batch, each with a gradient in every one of `stages`."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self._stages = range(stages)
        self.due = Ledger(stages, microbatches)
        self.counted = Counted()
        self.trainers = Admission(own_pace=stages == 1)

    # --- members ----------------------------------------------------------------------------------------------

    def lose(self, peer: str, now: float) -> None:
        """All that `peer` held is lost."""
        self.due.lose(peer, now)

    def told(self, now: float, peer: str, stage: int, held: frozenset[Mb], at_current: bool) -> None:
        """What a member says it holds: the rest that was credited to it is lost; only its connection had broken."""
        self.due.keep_only(peer, stage, held, now)
        if at_current:
            for mb in sorted(held & self.due.missing[stage]):
                self.due.hold(mb, stage, peer)

    def adopt(self, now: float, held: Iterable[Mb], holder: Callable[[int, Mb], str | None]) -> None:
        """Count what is held in every stage already; `holder` says by whom."""
        for mb in sorted(held):
            holders = [holder(stage, mb) for stage in self._stages]
            if all(holders) and mb not in self.due.entries and self.due.admit(mb, now):
                self.due.entries[mb].done = True
                for stage, peer in enumerate(holders):
                    self.due.hold(mb, stage, peer or "")

    # --- trainers ---------------------------------------------------------------------------------------------

    def take(self, now: float, report: TrainerReport, serves: Serves, settled: Sequence[bool]) -> bool:
        """A trainer's news of the step; True when the batch shrank. Stages that are `settled` need nothing more."""
        for done in report.done:
            self._take_done(now, Mb(report.peer, done.seq), done.holders, serves, settled)
        begun = {*report.open, *(done.seq for done in report.done)}
        # What the trainer no longer names and never finished, it has given up.
        return self._drop_where(lambda mb, e: mb.trainer == report.peer and not e.done and mb.seq not in begun)

    def _take_done(self, now: float, mb: Mb, holders: Sequence[str], serves: Serves, settled: Sequence[bool]) -> None:
        if len(holders) != len(self._stages) or mb in self.counted or not self.due.admit(mb, now):
            return
        entry = self.due.entries[mb]
        if not entry.done:
            self.trainers.finished(now, mb.trainer, entry.since)
        entry.done = True
        for stage, holder in enumerate(holders):
            if settled[stage]:
                continue
            if serves(holder, stage):
                self.due.hold(mb, stage, holder)
            else:
                self.due.unhold(mb, stage, now)

    def drop_dead(self, now: float, settled: Sequence[bool], lease_s: float) -> bool:
        """Let go of what nobody can finish: its trainer is gone, or it took far too long. True: the batch shrank."""

        def dead(mb: Mb, entry: Entry) -> bool:
            late = now - entry.since > lease_s
            return self.due.is_missing(mb, settled) and (mb.trainer not in self.trainers or late)

        return self._drop_where(dead)

    def _drop_where(self, unwanted: Callable[[Mb, Entry], bool]) -> bool:
        return bool(self.due.drop_where(unwanted))

    def fill(self, now: float) -> bool:
        """Admit what trainers wish for, while there is room; True when there was something."""
        before = len(self.due.entries)
        for mb in self.trainers.wishes(now, self.due, self.counted):
            self.due.admit(mb, now)
        return len(self.due.entries) > before

    def admitted(self, trainer: str) -> list[int]:
        """The trainer's microbatches in the batch."""
        return self.due.of_trainer(trainer)

    def whole_in_s(self, now: float) -> float | None:
        """Seconds until the batch is whole; None: nobody knows."""
        return self.trainers.whole_in_s(now, self.due)

    def redo(self, trainer: str, settled: Sequence[bool]) -> list[Redo]:
        """What the trainer has to repeat, because a peer that held it is gone."""
        return self.due.redo(trainer, settled)

    # --- steps ------------------------------------------------------------------------------------------------

    def step_made(self, step: int) -> None:
        """The batch of `step` has been averaged and counted: the next one begins."""
        if self.due.entries:
            self.counted.add(step, self.due.entries)
            self.due.clear()

    def go_to(self, step: int, batch_before: Iterable[Mb]) -> None:
        """The swarm stands at `step` now, by another way than a step from here; this batch led there."""
        self.due.clear()
        self.counted.restart(step - 1, batch_before)

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.due.check()
        assert not any(mb in self.counted for mb in self.due.entries)
