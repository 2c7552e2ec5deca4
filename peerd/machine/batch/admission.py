"""Admission of microbatches to the batch: each trainer's in turn, but not one that would hold the step up.

Where trainers compute for themselves (a model of one stage) they are as fast as their machines. A step ends when the
last admitted microbatch is done, so near its end a slow trainer gets no further one: it would still compute when the
others have long been able to do it too. In pipelines the stages set the pace, and every wish is taken. Times are
measured here from reports; what a trainer says of its speed counts for nothing. Invariant: the fastest trainer that
wishes and has nothing under way is never passed over, so a batch is filled whoever is slow; but one that did not
finish what it had is given less (`Leash`), and its place goes to others when the step has long waited for nobody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import LEASHED_TRAINERS
from peerd.core.messages.swarm import Mb
from peerd.machine.batch.forecast import TrainerPace, WorkerPace, shared_in_s, whole_in_s
from peerd.machine.batch.ledger import Ledger
from peerd.machine.batch.probation import Probation
from peerd.machine.batch.trainer_limit import Leash

_TURN_KEEP = 0.7  # of how long a microbatch took from admission to its end, at each new one
_NEWCOMER_LEASE_S = 2.0  # how long a whole batch waits for a trainer that never helped to make a step, at first
_LATE_FACTOR = 4.0  # times as long as it usually takes others
_PATIENCE_MOST = 6  # doublings of patience while nobody finishes anything


@dataclass(slots=True)
class _Trainer:
    open: tuple[int, ...] = ()  # wished for or begun, in its order of preference
    bound: frozenset[int] = frozenset()  # of these, begun for step `bound_to` and good for no other
    bound_to: int = 0
    pace: TrainerPace = field(default_factory=TrainerPace)
    turn_s: float = 0.0  # from admission to its end, of late; 0: none yet

    @property
    def seconds(self) -> float:
        """Measured seconds of one microbatch; 0: not yet."""
        return self.pace.seconds


class Admission:
    """The trainers of a run and their wishes. `own_pace`: they compute for themselves."""

    def __init__(self, own_pace: bool) -> None:
        self._own_pace = own_pace
        self._trainers: dict[str, _Trainer] = {}
        self._leashes = BoundedDict[str, Leash](LEASHED_TRAINERS)
        self._proven = BoundedDict[str, None](LEASHED_TRAINERS)  # trainers that helped to make a step
        self.probation = Probation()
        self._under_way: dict[str, int] = {}  # when `wishes` was asked last
        self._patience = 0  # how often leases ran out since anybody finished anything
        self._ran_out_at = 0.0

    def count(self) -> int:
        """Number of trainers."""
        return len(self._trainers)

    def __contains__(self, trainer: str) -> bool:
        return trainer in self._trainers

    def first(self) -> str | None:
        """The first trainer by name."""
        return min(self._trainers, default=None)

    def report(self, trainer: str, wishes: tuple[int, ...], bound: Iterable[int] = (), bound_to: int = 0) -> None:
        """Record what the trainer has open now; `bound` are good for step `bound_to` only."""
        known = self._trainers.setdefault(trainer, _Trainer())
        known.open, known.bound, known.bound_to = wishes, frozenset(bound), bound_to

    def gone(self, trainer: str) -> None:
        self._trainers.pop(trainer, None)

    def finished(self, now: float, trainer: str, began: float) -> None:
        """The trainer has finished a microbatch that was admitted at `began`."""
        if trainer in self._trainers:
            known, turn_s = self._trainers[trainer], now - began
            known.pace.finished(now, began)
            known.turn_s = known.turn_s * _TURN_KEEP + turn_s * (1 - _TURN_KEEP) if known.turn_s else turn_s
            self._patience = 0
            if trainer in self._leashes:
                self._leashes[trainer].helped()

    # --- trainers that do not finish --------------------------------------------------------------------------

    def overdue(self, now: float, trainer: str, since: float, lease_s: tuple[float, float], alone: bool) -> bool:
        """True when the trainer has had its microbatch, admitted at `since`, for far too long.

        `lease_s`: where the others show what is usual, and else; `alone`: the batch has no room for anything else.
        """
        lease, first = lease_s
        patience = 2.0 ** min(self._patience, _PATIENCE_MOST)
        others = [t for name, t in self._trainers.items() if name != trainer and t.turn_s]
        if not alone or not others:
            own = self._trainers.get(trainer)
            return now - max(since, own.pace.at if own is not None else since) > first * patience
        usual = median(t.turn_s for t in others)
        if self.is_newcomer(trainer):
            lease = min(lease, _NEWCOMER_LEASE_S * 1.5 ** self.probation.times(now, trainer))
        waited_s = now - max(since, *(t.pace.at for t in others))
        strikes = self._leashes[trainer].strikes if trainer in self._leashes else 0
        return waited_s > max(lease / 2.0 ** min(strikes, 4), _LATE_FACTOR * usual) * patience

    def ran_out(self, now: float) -> None:
        """Note that leases ran out: if nobody finishes anything before the next ones do, all are slow, and not just
        these.
        """
        self._patience += now > self._ran_out_at
        self._ran_out_at = now

    def strike(self, now: float, trainer: str) -> int:
        """The trainer stood in the way of the step: it gets less; how often by now."""
        if self.is_newcomer(trainer):
            self.probation.failed(now, trainer)
        leash = self._leashes.setdefault(trainer, Leash())
        known = self._trainers.get(trainer)
        return leash.strike(now, self._under_way.get(trainer, 0), known is not None and known.turn_s > 0)

    def is_newcomer(self, trainer: str) -> bool:
        """True when it has not yet helped to make a step, while others here have."""
        return trainer not in self._proven and any(name in self._proven for name in self._trainers)

    def step_made(self, helped: Iterable[str]) -> None:
        """Record that these helped to make a step; a trainer that had stood in the way recovers."""
        for trainer in helped:
            self._proven[trainer] = None
        for trainer in [trainer for trainer, leash in self._leashes.items() if not leash.step_made()]:
            del self._leashes[trainer]

    def _given(self, now: float) -> dict[str, int | None]:
        """Number of microbatches that each trainer may have under way; None: any number."""
        rested = [name for name in self._trainers if name not in self._leashes or self._leashes[name].until <= now]
        found: dict[str, int | None] = {}
        for name in self._trainers:
            leash = self._leashes.get(name)
            found[name] = None if leash is None else 0 if rested and leash.until > now else leash.most
            if self.is_newcomer(name) and found[name] != 0:  # one microbatch, until a step has counted one
                found[name] = 0 if self.probation.waits(now, name) else 1
        return found

    # --- filling ----------------------------------------------------------------------------------------------

    def whole_in_s(self, now: float, ledger: Ledger) -> float | None:
        """Seconds until the batch is whole, from what is not done of it and the pace of those at work; None: nobody
        knows.
        """
        begun = ledger.begun()
        dead = sum(count for name, (count, _) in begun.items() if name not in self._trainers)
        workers = self._at_work(now, begun)
        return whole_in_s(ledger.capacity - len(ledger.entries) + dead, workers.values())

    def wishes(
        self, now: float, ledger: Ledger, counted: Container[Mb], beside: Ledger | None = None, step: int = 0
    ) -> Iterator[Mb]:
        """Microbatches to admit to `step`'s batch, while there is room: the caller admits each before the next.

        `beside`: another step's batch, with other microbatches of the same trainers under way.
        """
        ledgers = [ledger] if beside is None else [ledger, beside]
        # Trainers never measured come first, so that one step tells of them all.
        order = sorted(self._trainers.items(), key=lambda item: (item[1].seconds > 0 and self._own_pace, item[0]))
        turns = ([Mb(name, seq) for seq in t.open if t.bound_to == step or seq not in t.bound] for name, t in order)
        workers = self._at_work(now, _begun(ledgers)) if self._own_pace and not ledger.full else {}
        given, under_way = self._given(now), sum((one.unfinished() for one in ledgers), Counter[str]())
        self._under_way = under_way
        for wishes in zip_longest(*turns):
            for mb in wishes:
                if ledger.full:
                    return
                if mb is None or mb in counted or any(mb in one.entries for one in ledgers):
                    continue
                most = given[mb.trainer]
                if most is not None and under_way[mb.trainer] >= most:
                    continue
                if not self._own_pace:
                    under_way[mb.trainer] += 1
                    yield mb
                elif _in_time(mb.trainer, ledger.capacity - len(ledger.entries), workers):
                    under_way[mb.trainer] += 1
                    yield mb
                    before = workers[mb.trainer]
                    waited_s = before.waited_s if before.begun else 0.0
                    workers[mb.trainer] = WorkerPace(before.seconds, before.begun + 1, waited_s)

    def _at_work(self, now: float, begun: dict[str, tuple[int, float]]) -> dict[str, WorkerPace]:
        """Trainers that wish for microbatches or have begun some, by name."""
        found = {}
        for name, trainer in self._trainers.items():
            count, since = begun.get(name, (0, now))
            if trainer.open or count:
                found[name] = WorkerPace(trainer.seconds, count, now - max(since, trainer.pace.at))
        return found


def _begun(ledgers: Iterable[Ledger]) -> dict[str, tuple[int, float]]:
    """The result of `Ledger.begun`, of several batches together."""
    found: dict[str, tuple[int, float]] = {}
    for ledger in ledgers:
        for name, (count, since) in ledger.begun().items():
            others, before = found.get(name, (0, since))
            found[name] = others + count, min(since, before)
    return found


def _in_time(trainer: str, left: int, workers: dict[str, WorkerPace]) -> bool:
    """True when the trainer would be done with one more soon after all together are done with it and what else is
    `left`.
    """
    together_s = shared_in_s(left, workers.values())
    if not workers[trainer].seconds or together_s is None:
        return True
    free_in_s, seconds = workers[trainer].free()
    return free_in_s + seconds <= together_s + min(worker.seconds for worker in workers.values() if worker.seconds)
