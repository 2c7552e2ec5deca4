"""A trainer's books: which microbatches it has begun, which the step counts, which must be done again.

Decides from the conductor's answers what to start, to drop and to repeat; computes nothing. In a delayed run the books
hold microbatches of two steps, the one under way and the next. Invariants: every batch of samples that was taken from
the data is in exactly one place: waiting, begun, finished, counted, dismissed as not finite, or lost, and it is lost
only when nobody can say any more how its step ended; what was begun for a step counts in that one, or begins again
under another number. With each goes what others must see of it: the conductor's newest grant, and the receipts of its
holders. Hostile input: a conductor that names microbatches or stages that are not there is not heard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from peerd.core.limits import REPORT_DONE_BYTES
from peerd.core.messages.encoding import encode
from peerd.core.messages.swarm import Done, Grant, Receipt, Redo, TrainerAnswer

T = TypeVar("T")  # what a microbatch carries: its samples, and what its stages gave


class Holding(NamedTuple):
    """The peer that holds a microbatch's gradient in one stage, and the receipt that it has signed."""

    peer: str
    receipt: Receipt | None


@dataclass(slots=True)
class Begun(Generic[T]):
    """A microbatch under its number."""

    seq: int
    load: T
    step: int | None = None  # the step to whose batch it was admitted
    finished: bool = False
    unsaid: bool = False  # finished, or repeated, and the conductor has not taken the news
    redoing: set[int] = field(default_factory=set)
    holders: list[str] = field(default_factory=list)
    receipts: list[Receipt | None] = field(default_factory=list)
    grant: Grant | None = None  # the newest that names it

    @property
    def admitted(self) -> bool:
        return self.step is not None


@dataclass(frozen=True, slots=True)
class Start(Generic[T]):
    """Send this microbatch through all stages."""

    item: Begun[T]


@dataclass(frozen=True, slots=True)
class Repeat(Generic[T]):
    """Do one stage of this microbatch again."""

    item: Begun[T]
    stage: int


@dataclass(frozen=True, slots=True)
class DropMicrobatch(Generic[T]):
    """Stop whatever runs for this microbatch; its samples wait again under another number."""

    item: Begun[T]


Order = Start[T] | Repeat[T] | DropMicrobatch[T]


@dataclass(slots=True)
class MicrobatchTally:
    """Counters of microbatches by outcome."""

    begun: int = 0
    counted: int = 0
    redone: int = 0  # stages done again because their peer was lost
    requeued: int = 0  # begun again from the start
    lost: int = 0
    not_finite: int = 0  # dropped for good: their outputs or gradients are not finite


class TrainerLedger(Generic[T]):
    """One trainer's part in the run. `session` makes its numbers differ from those of an earlier life."""

    def __init__(self, session: int) -> None:
        self.step = 0
        self.tally = MicrobatchTally()
        self.waiting: list[T] = []  # samples that no number has yet
        self.items: dict[int, Begun[T]] = {}
        self.unknown: list[int] = []  # the conductor has them done again, and they are not here any more
        self._evaluation: Grant | None = None
        self.not_finite: list[int] = []  # dismissed in this step, and the conductor has not taken the news
        self._next = session << 31
        self._joined = False

    def wish(self, in_flight: int) -> None:
        """Give numbers to waiting samples until so many are open."""
        while self.waiting and len(self.open()) < in_flight:
            self.items[self._next] = Begun(self._next, self.waiting.pop(0))
            self._next += 1

    def open(self) -> list[int]:
        """Numbers that are wished for or begun: what the conductor may admit, or has."""
        return [seq for seq, item in self.items.items() if not item.finished]

    def early(self) -> list[int]:
        """Numbers that were begun for the step after the one under way."""
        return [seq for seq, item in self.items.items() if item.step == self.step + 1]

    def news(self) -> list[Done]:
        """Finished microbatches of which the conductor has not heard."""
        unsaid = [item for item in self.items.values() if item.finished and item.unsaid]
        return [Done(item.seq, list(item.holders), list(item.receipts)) for item in unsaid]

    def grant_of(self, seq: int) -> Grant | None:
        """The newest grant of this microbatch, which shows stage peers that it is admitted; None: there is none."""
        item = self.items.get(seq)
        return item.grant if item is not None else None

    def evaluation_grant(self) -> Grant | None:
        """The newest grant to evaluate, which may be given to another trainer by now; None: there was none."""
        return self._evaluation

    def pressing(self, together: int) -> bool:
        """True when the conductor should hear now. So many may be told together, but nobody shall wait for news.

        Not the step: what we have done may be the last that its batch lacks. Not we: for something to begin.
        """
        unsaid = [item for item in self.items.values() if item.finished and item.unsaid]
        begun = {item.step for item in self.items.values() if item.admitted and not item.finished}
        last = self.step not in begun and any(item.step == self.step for item in unsaid)
        return len(unsaid) >= together or not begun or last

    def finish(self, item: Begun[T], holders: Iterable[str], receipts: Iterable[Receipt | None] = ()) -> None:
        """All stages of `item` are done; `holders`, and what they have signed, by stage."""
        item.holders, item.receipts = list(holders), list(receipts)
        item.finished = item.unsaid = True

    def repeated(self, item: Begun[T], stage: int, holder: str, receipt: Receipt | None = None) -> None:
        """One stage was done again."""
        item.holders[stage] = holder
        if item.receipts:
            item.receipts[stage] = receipt
        item.redoing.discard(stage)
        item.unsaid = True
        self.tally.redone += 1

    def dismiss(self, item: Begun[T]) -> None:
        """Drop `item` for good, with its samples: it has no finite gradient. Another takes its place in the batch."""
        del self.items[item.seq]
        self.not_finite.append(item.seq)
        self.tally.not_finite += 1

    def repeat_all(self) -> None:
        """A new conductor knows nothing of this step: say everything again."""
        for item in self.items.values():
            item.unsaid = item.finished

    def answered(self, answer: TrainerAnswer, said: Iterable[Done], not_finite: Iterable[int] = ()) -> list[Order[T]]:
        """Take the conductor's answer to a report that said `said`, and which microbatches are `not_finite`."""
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
        """The swarm is at another step: count what it counted, go on with what was early, begin the rest again."""
        orders: list[Order[T]] = []
        of_step, of_early = (None if said is None else {*said} for said in (answer.counted, answer.counted_early))
        for item in list(self.items.values()):
            if item.step is None:
                continue  # a wish: may be admitted to the new step under the same number
            if item.step == self.step + 1 == answer.step:
                continue  # it was early and no longer is
            del self.items[item.seq]
            counted = of_step if item.step == self.step else of_early
            if counted is not None and item.seq in counted:
                self.tally.counted += 1
            elif counted is None and item.finished:
                self.tally.lost += 1  # it may count in the swarm's state, or not: done again, it could count twice
            else:
                self._again(item)
            orders.append(DropMicrobatch(item))
        self.step, self._joined = answer.step, True
        return orders

    def _match(self, answer: TrainerAnswer) -> list[Order[T]]:
        """Start what was admitted, drop what no longer is, repeat what was lost."""
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
    """The part of the news that goes into one report, and the numbers of the rest, which wait for the next.

    The report has to name the rest as open: the conductor gives away what a trainer does not name any more.
    """
    told, later, left = list[Done](), list[int](), REPORT_DONE_BYTES
    for done in news:
        left -= len(encode(done)) if left > 0 else 0
        if left >= 0 or not told:
            told.append(done)
        else:
            later.append(done.seq)
    return told, later
