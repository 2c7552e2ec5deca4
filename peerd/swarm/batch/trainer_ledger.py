"""A trainer's ledger: which microbatches it has begun, which ones the step counts, which ones must be computed again.

Decides from the conductor's answers what to start, drop and repeat; computes nothing. In a delayed run the ledger holds
microbatches of two steps, the current one and the next.

Invariants: every batch of samples that was taken from the data is in exactly one state: waiting, begun, finished,
counted, dismissed as not finite, or lost. It is lost only if nobody can determine any more how its step ended. What was
begun for a step counts in that step, or begins again under another number. Each microbatch carries what other peers
must see of it: the conductor's newest grant, and its holders' receipts. Hostile input: microbatches and stages that do
not exist are ignored in a conductor's answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from peerd.core.limits import REPORT_DONE_BYTES
from peerd.messages.encoding import encode
from peerd.messages.swarm import Done, Grant, Receipt, Redo, TrainerAnswer

T = TypeVar("T")  # what a microbatch carries: its samples, and the results of its stages


class Holding(NamedTuple):
    """The peer that holds a microbatch's gradient in one stage, and its signed receipt."""

    peer: str
    receipt: Receipt | None


@dataclass(slots=True)
class Begun(Generic[T]):
    """A microbatch that has a number: requested, begun or finished."""

    seq: int
    load: T
    step: int | None = None  # the step to whose batch it was admitted
    finished: bool = False
    unsaid: bool = False  # finished, or repeated, and the conductor has not acknowledged this
    redoing: set[int] = field(default_factory=set)
    holders: list[str] = field(default_factory=list)
    receipts: list[Receipt | None] = field(default_factory=list)
    grant: Grant | None = None  # the newest one that names it

    @property
    def admitted(self) -> bool:
        return self.step is not None


@dataclass(frozen=True, slots=True)
class Start(Generic[T]):
    """Order to send this microbatch through all stages."""

    item: Begun[T]


@dataclass(frozen=True, slots=True)
class Repeat(Generic[T]):
    """Order to compute one stage of this microbatch again."""

    item: Begun[T]
    stage: int


@dataclass(frozen=True, slots=True)
class DropMicrobatch(Generic[T]):
    """Order to stop all work on this microbatch, since its number is no longer in use."""

    item: Begun[T]


Order = Start[T] | Repeat[T] | DropMicrobatch[T]


@dataclass(slots=True)
class MicrobatchTally:
    """Counters of microbatches by outcome."""

    begun: int = 0
    counted: int = 0
    redone: int = 0  # stages computed again because their peer was lost
    requeued: int = 0  # begun again from the start
    lost: int = 0
    not_finite: int = 0  # dropped for good: their outputs or gradients are not finite


class TrainerLedger(Generic[T]):
    """One trainer's microbatches. `session` makes its numbers differ from those of an earlier process."""

    def __init__(self, session: int) -> None:
        self.step = 0
        self.tally = MicrobatchTally()
        self.waiting: list[T] = []  # samples without a number
        self.items: dict[int, Begun[T]] = {}
        self.unknown: list[int] = []  # microbatches that the conductor wants repeated, but that are no longer here
        self._evaluation: Grant | None = None
        self.not_finite: list[int] = []  # dismissed in this step, and not acknowledged by the conductor
        self._next = session << 31
        self._joined = False

    def wish(self, in_flight: int) -> None:
        """Assign numbers to waiting samples until `in_flight` microbatches are open."""
        while self.waiting and len(self.open()) < in_flight:
            self.items[self._next] = Begun(self._next, self.waiting.pop(0))
            self._next += 1

    def open(self) -> list[int]:
        """Numbers that are requested or begun: those that the conductor may admit, or has admitted."""
        return [seq for seq, item in self.items.items() if not item.finished]

    def early(self) -> list[int]:
        """Numbers that were begun for the step after the current one."""
        return [seq for seq, item in self.items.items() if item.step == self.step + 1]

    def news(self) -> list[Done]:
        """Finished microbatches that the conductor has not acknowledged."""
        unsaid = [item for item in self.items.values() if item.finished and item.unsaid]
        return [Done(item.seq, list(item.holders), list(item.receipts)) for item in unsaid]

    def grant_of(self, seq: int) -> Grant | None:
        """Newest grant of this microbatch, which shows stage peers that it is admitted, or None."""
        item = self.items.get(seq)
        return item.grant if item is not None else None

    def evaluation_grant(self) -> Grant | None:
        """Newest grant that permits this trainer to evaluate, or None. Another trainer may have a newer one."""
        return self._evaluation

    def pressing(self, together: int) -> bool:
        """True if the trainer should report now. Up to `together` microbatches share a report, unless somebody waits.

        The step waits if all that this trainer has begun for it is finished, since that may be the last that the batch
        lacks. The trainer itself waits if nothing else is begun.
        """
        unsaid = [item for item in self.items.values() if item.finished and item.unsaid]
        begun = {item.step for item in self.items.values() if item.admitted and not item.finished}
        last = self.step not in begun and any(item.step == self.step for item in unsaid)
        return len(unsaid) >= together or not begun or last

    def finish(self, item: Begun[T], holders: Iterable[str], receipts: Iterable[Receipt | None] = ()) -> None:
        """Record that all stages of `item` are done, with the holders and their receipts by stage."""
        item.holders, item.receipts = list(holders), list(receipts)
        item.finished = item.unsaid = True

    def repeated(self, item: Begun[T], stage: int, holder: str, receipt: Receipt | None = None) -> None:
        """Record that one stage was computed again."""
        item.holders[stage] = holder
        if item.receipts:
            item.receipts[stage] = receipt
        item.redoing.discard(stage)
        item.unsaid = True
        self.tally.redone += 1

    def dismiss(self, item: Begun[T]) -> None:
        """Drop `item` for good, with its samples: it has no finite gradient. Another takes its slot in the batch."""
        del self.items[item.seq]
        self.not_finite.append(item.seq)
        self.tally.not_finite += 1

    def repeat_all(self) -> None:
        """Report everything again, because a new conductor knows nothing of this step."""
        for item in self.items.values():
            item.unsaid = item.finished

    def answered(self, answer: TrainerAnswer, said: Iterable[Done], not_finite: Iterable[int] = ()) -> list[Order[T]]:
        """Process the conductor's answer to a report of `said` and `not_finite`; returns the orders that follow."""
        orders: list[Order[T]] = []
        if answer.taken or answer.step != self.step:
            told = set(not_finite)
            self.not_finite = [seq for seq in self.not_finite if seq not in told and answer.step == self.step]
        if answer.step != self.step or not self._joined:
            orders += self._close_step(answer)
        elif answer.taken:
            for done in said:
                item = self.items.get(done.seq)
                if item is not None and (item.holders, item.receipts) == (done.holders, done.receipts):
                    item.unsaid = False
        orders += self._match(answer)
        self._take_grants(answer)
        return orders

    def _close_step(self, answer: TrainerAnswer) -> list[Order[T]]:
        """Handle a change of the swarm's step: count what it counted, keep what was early, begin the rest again."""
        orders: list[Order[T]] = []
        of_step, of_early = (None if said is None else {*said} for said in (answer.counted, answer.counted_early))
        for item in list(self.items.values()):
            if item.step is None:
                continue  # only requested: may be admitted to the new step under the same number
            if item.step == self.step + 1 == answer.step:
                continue  # it was early and no longer is
            del self.items[item.seq]
            counted = of_step if item.step == self.step else of_early
            if counted is not None and item.seq in counted:
                self.tally.counted += 1
            elif counted is None and item.finished:
                self.tally.lost += 1  # it may have counted, or not: computed again, it could count twice
            else:
                self._again(item)
            orders.append(DropMicrobatch(item))
        self.step, self._joined = answer.step, True
        return orders

    def _match(self, answer: TrainerAnswer) -> list[Order[T]]:
        """Orders to start microbatches that were admitted, drop those that no longer are, and repeat lost stages."""
        orders: list[Order[T]] = []
        places = dict.fromkeys(answer.admitted, answer.step) | dict.fromkeys(answer.early, answer.step + 1)
        for item in list(self.items.values()):
            place = places.get(item.seq)
            if item.step is None:
                if place is not None:
                    item.step = place
                    self.tally.begun += 1
                    orders.append(Start(item))
            elif place != item.step and (place is not None or (answer.taken and not item.unsaid)):
                del self.items[item.seq]
                self._again(item)
                orders.append(DropMicrobatch(item))
        for redo in answer.redo:
            orders += self._redo(redo)
        self.unknown = [redo.seq for redo in answer.redo if redo.seq not in self.items]
        return orders

    def _take_grants(self, answer: TrainerAnswer) -> None:
        self._evaluation = answer.evaluate or self._evaluation
        for grant in filter(None, (answer.grant, answer.grant_early)):
            for seq in grant.seqs:
                item = self.items.get(seq)
                if item is not None and item.step == grant.step:
                    item.grant = grant

    def _redo(self, redo: Redo) -> list[Order[T]]:
        item = self.items.get(redo.seq)
        if item is None or not item.finished or item.unsaid or redo.stage in item.redoing:
            return []
        if redo.stage >= len(item.holders):
            return []  # the run has no such stage: the conductor is wrong, or lies
        item.redoing.add(redo.stage)
        return [Repeat(item, redo.stage)]

    def _again(self, item: Begun[T]) -> None:
        self.waiting.insert(0, item.load)
        self.tally.requeued += 1


def told_at_once(news: Iterable[Done]) -> tuple[list[Done], list[int]]:
    """Split finished microbatches: those that fit into one report, and the numbers of the rest, for the next report.

    The report has to name the rest as open, since the conductor reassigns what a trainer no longer names.
    """
    told, later, left = list[Done](), list[int](), REPORT_DONE_BYTES
    for done in news:
        left -= len(encode(done)) if left > 0 else 0
        if left >= 0 or not told:
            told.append(done)
        else:
            later.append(done.seq)
    return told, later
