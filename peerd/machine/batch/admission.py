"""Admission of microbatches to the batch: each trainer's in turn, but not one that would hold the step up.

Where trainers compute for themselves (a model of one stage) they are as fast as their machines. A step ends when the
last admitted microbatch is done, so near its end a slow trainer gets no further one: it would still compute when the
others have long been able to do it too. In pipelines the stages set the pace, and every wish is taken. Times are
measured here from reports; what a trainer says of its speed counts for nothing. Invariant: of the trainers that wish
for a microbatch, may have one and compute none, the fastest gets the next one, so every batch is filled. A trainer that
did not finish what it had is given less (`TrainerLimit`), and its place goes to others when the step has long waited
for nobody else. Newcomers get little until they have helped to make a step (`Newcomers`): nothing is left to them. Who
trains alone is given all that it wishes for, however slow: nobody else could do it. With each report only trainers are
looked at whose wishes may have no place yet: `wish_again` names those that lost one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, KeysView, Mapping, Sequence, Set
from dataclasses import dataclass, field

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import LEASHED_TRAINERS
from peerd.core.messages.swarm import Mb
from peerd.machine.batch.forecast import TrainerPace, WorkerPace, shared_in_s, whole_in_s
from peerd.machine.batch.lateness import Lateness, Usual
from peerd.machine.batch.ledger import Ledger
from peerd.machine.batch.newcomers import WAIT_S, Newcomers
from peerd.machine.batch.trainer_limit import TrainerLimit

_TURN_KEEP = 0.7  # of how long a microbatch took from admission to its end, at each new one
_PATIENCE_MOST = 6  # doublings of patience while nobody finishes anything
_HALVINGS_MOST = 4  # of the lease of a trainer that stood in the way


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
        self.own_pace = own_pace
        self.resting: Set[str] = frozenset()  # trainers whose replicas contribute nothing for now
        self._trainers: dict[str, _Trainer] = {}
        self._leashes = BoundedDict[str, TrainerLimit](LEASHED_TRAINERS)
        self._first: str | None = None  # by name; None: to be looked for
        self._wishing: dict[str, None] = {}  # trainers that may wish for something which has no place in a batch
        self.newcomers = Newcomers()
        self._others_work = True  # somebody that sits nothing out works, or may have what it wishes for
        self._patience = 0  # how often leases ran out since anybody finished anything
        self._ran_out_at = 0.0

    def seconds(self, trainer: str) -> float:
        """Measured seconds of one microbatch of a trainer; 0: not yet."""
        known = self._trainers.get(trainer)
        return known.seconds if known is not None else 0.0

    def count(self) -> int:
        """Number of trainers."""
        return len(self._trainers)

    def __contains__(self, trainer: str) -> bool:
        return trainer in self._trainers

    @property
    def experienced(self) -> Set[str]:
        """The trainers at work that have helped to make a step; all that are here, where none has."""
        others = self.newcomers.others
        return (others - self.resting if self.resting else others) or self._trainers.keys()

    def absent(self, trainers: KeysView[str]) -> set[str]:
        """Those of them that are not here."""
        return trainers - self._trainers.keys()

    def first(self) -> str | None:
        """The first trainer by name."""
        if self._first is None:
            self._first = min(self._trainers, default=None)
        return self._first

    def first_at_work(self) -> str | None:
        """The first trainer by name of those that have something to do; of all, where none has."""
        return min(self._trainers.keys() - self.resting, default=None) if self.resting else self.first()

    def report(self, trainer: str, wishes: tuple[int, ...], bound: Iterable[int] = (), bound_to: int = 0) -> None:
        """Record what the trainer has open now; `bound` are good for step `bound_to` only."""
        known = self._trainers.get(trainer)
        if known is None:
            known = self._trainers[trainer] = _Trainer()
            self._first = None
            self.newcomers.arrived(trainer)
        self._wishing[trainer] = None
        known.open, known.bound, known.bound_to = wishes, frozenset(bound), bound_to

    def gone(self, trainer: str) -> None:
        self._trainers.pop(trainer, None)
        self._wishing.pop(trainer, None)
        self.newcomers.gone(trainer)
        if trainer == self._first:
            self._first = None

    def wish_again(self, trainers: Iterable[str] | None = None) -> None:
        """Microbatches of these, or of all, have no place in a batch any more."""
        again = self._trainers if trainers is None else trainers
        self._wishing |= {trainer: None for trainer in again if trainer in self._trainers}

    def finished(self, now: float, trainer: str, began: float) -> None:
        """The trainer has finished a microbatch that was admitted at `began`."""
        if trainer in self._trainers:
            known, turn_s = self._trainers[trainer], now - began
            known.pace.finished(now, began)
            known.turn_s = known.turn_s * _TURN_KEEP + turn_s * (1 - _TURN_KEEP) if known.turn_s else turn_s
            self.newcomers.finished(trainer, turn_s)
            self._patience = 0
            if trainer in self._leashes:
                self._leashes[trainer].helped()

    # --- trainers that do not finish --------------------------------------------------------------------------

    def lateness(self, now: float, lease_s: tuple[float, float], alone: bool, early: bool = False) -> Lateness:
        """The judge of overdue microbatches as of now. `lease_s`: where the others show what is usual, and else;
        `alone`: the batch has no room for anything else; `early`: they are of the batch after it.
        """

        def usual() -> Usual:  # of those that work: who wishes for nothing could not do it instead
            trainers = self._trainers.items() if alone else ()
            return Usual({name: (t.turn_s, t.pace.at) for name, t in trainers if t.turn_s and t.open})

        patience = 2.0 ** min(self._patience, _PATIENCE_MOST)
        if early or not self.newcomers.are_waited_for:
            return Lateness(now, lease_s, self._least_lease(*lease_s), patience, usual, self._lease, self._done_at)

        def wait_ends(trainer: str) -> float | None:
            return self.newcomers.wait_ends(now, trainer) if trainer in self.newcomers else None

        return Lateness(now, lease_s, 0.0, patience, usual, self._lease, self._done_at, wait_ends)

    def look_for_waits(self, now: float, due: Ledger) -> None:
        """Take note whether the step waits for newcomers alone, while others would do their part of the batch."""
        self.newcomers.look(now, due, lambda name: bool(self._unplaced(name, [due], ())))

    def _least_lease(self, lease: float, first: float) -> float:
        """No trainer that is here has a shorter lease."""
        if 0 < len(self.newcomers.others) < len(self._trainers):  # there are newcomers
            lease = min(lease, WAIT_S)
        return min(first, lease / 2.0**_HALVINGS_MOST if self._leashes else lease)

    def _lease(self, now: float, trainer: str, lease: float) -> float:
        """The lease of one trainer, of `lease` for those that nothing is said against."""
        if trainer in self.newcomers:
            return min(lease, self.newcomers.lease_s(trainer))
        leash = self._leashes.get(trainer)
        return lease / 2.0 ** min(leash.strikes if leash is not None else 0, _HALVINGS_MOST)

    def _done_at(self, trainer: str) -> float:
        """The time at which the trainer finished something last."""
        known = self._trainers.get(trainer)
        return known.pace.at if known is not None else -math.inf

    def ran_out(self, now: float) -> None:
        """Note that leases ran out: if nobody finishes anything before the next ones do, all are slow, and not just
        these.
        """
        self._patience += now > self._ran_out_at
        self._ran_out_at = now

    def strike(self, now: float, trainer: str, under_way: int, *, proven: bool = False) -> int:
        """The trainer stood in the way of the step with so many under way: it gets less; how often by now.

        `proven`: as in `Probation.failed`.
        """
        if trainer in self.newcomers:
            return self.newcomers.failed(now, trainer, proven=proven)
        leash = self._leashes.setdefault(trainer, TrainerLimit())
        known = self._trainers.get(trainer)
        return leash.strike(now, under_way, known is not None and known.turn_s > 0)

    def step_made(self, helped: Iterable[str]) -> None:
        """Record that these helped to make a step; a trainer that had stood in the way recovers."""
        self.newcomers.step_made(helped, self._trainers)
        for trainer in [trainer for trainer, leash in self._leashes.items() if not leash.step_made()]:
            del self._leashes[trainer]

    def _given(self, now: float, trainer: str) -> int | None:
        """Number of microbatches that a trainer may have under way, or None if there is no limit."""
        leash = self._leashes.get(trainer) if len(self._trainers) > 1 else None
        most = None if leash is None else 0 if self._others_work and leash.until > now else leash.most
        if most != 0 and trainer in self.newcomers:
            return 0 if self.newcomers.why_nothing(now, trainer) else 1
        return most

    def why_nothing(self, now: float, trainer: str) -> str:
        """The text on why the trainer gets no microbatch for now; "" where nothing is against it."""
        if self._given(now, trainer) != 0:
            return ""
        leash = self._leashes.get(trainer)
        if leash is not None and leash.until > now:
            return "a pause, since this trainer did not finish microbatches that it was given"
        return self.newcomers.why_nothing(now, trainer)

    def _is_rested(self, now: float, trainer: str) -> bool:
        return trainer not in self._leashes or self._leashes[trainer].until <= now

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
        self,
        now: float,
        ledger: Ledger,
        counted: Container[Mb],
        beside: Ledger | None = None,
        step: int = 0,
        summed: Set[str] = frozenset(),
    ) -> Iterator[Mb]:
        """Microbatches to admit to `step`'s batch, while there is room: the caller admits each before the next.

        `beside`: another step's batch, with other microbatches of the same trainers under way. `summed`: trainers that
        get nothing while others may have what they wish for: their gradients are in a sum that would have to be made
        anew.
        """
        if ledger.full or not self._wishing:
            return
        ledgers = [ledger] if beside is None else [ledger, beside]
        unplaced = {name: self._unplaced(name, ledgers, counted) for name in self._wishing}
        self._wishing = {name: None for name, seqs in unplaced.items() if seqs and name not in self.resting}
        if not self._wishing:  # most reports wish for nothing new
            return
        begun = _begun(ledgers)
        wishing = [name for name in self._wishing if any(self._fits(name, seq, step) for seq in unplaced[name])]
        others = [name for name in wishing if name not in summed]
        given = self._shares(now, others, begun, ledger)
        if len(others) < len(wishing) and not any(most != 0 for most in given.values()):
            given = self._shares(now, wishing, begun, ledger)
        trainers = {name: self._trainers[name] for name in self._in_order(now, ledger, given)}
        paces = self._at_work(now, begun) if self.own_pace else {}
        paces = {name: pace for name, pace in paces.items() if name in trainers or name not in summed}
        workers = {name for name, pace in paces.items() if self._does_more(name, pace.begun, given, ledger)}
        under_way = {name: sum(one.under_way[name] for one in ledgers) for name in trainers}
        left = self._wishing.keys() - trainers.keys()  # trainers with a wish that gets no place now
        for mb in _in_turn([(name, own.open) for name, own in trainers.items()], ledgers):
            if ledger.full:
                return
            if any(mb in one.entries for one in ledgers) or mb in counted:
                continue
            left.add(mb.trainer)
            most = given[mb.trainer]
            if not self._fits(mb.trainer, mb.seq, step) or (most is not None and under_way[mb.trainer] >= most):
                continue
            if self.own_pace and not _in_time(paces, mb.trainer, workers, ledger.capacity - len(ledger.entries)):
                continue
            if mb.trainer in self.newcomers:
                # Another one of its place may have been let in just now.
                if self.newcomers.room(now, ledger) <= 0 or self.newcomers.why_nothing(now, mb.trainer):
                    continue
                self.newcomers.let_in(now, mb.trainer, ledger)
            under_way[mb.trainer] += 1
            yield mb
            if self.own_pace:
                before = paces[mb.trainer]
                waited_s = before.waited_s if before.begun else 0.0
                paces[mb.trainer] = WorkerPace(before.seconds, before.begun + 1, waited_s)
        self._wishing = {
            name: None for name in self._wishing if name in left and self._unplaced(name, ledgers, counted)
        }

    def _shares(
        self, now: float, wishing: Sequence[str], begun: Mapping[str, tuple[int, float]], ledger: Ledger
    ) -> dict[str, int | None]:
        """Number of microbatches that each of these may have under way, or None if there is no limit."""
        self._look_who_works(now, wishing, begun, ledger)
        return {name: self._given(now, name) for name in wishing}

    def _look_who_works(
        self, now: float, wishing: Sequence[str], begun: Mapping[str, tuple[int, float]], ledger: Ledger
    ) -> None:
        """Take note whether any trainer, of all and of those that have helped before, works or may have what it wishes
        for: what others do not do must not be left to them.
        """
        rested = [name for name in wishing if self._is_rested(now, name)]
        helped = [name for name in rested if name not in self.newcomers]
        at_work = [name for name in begun if name in self.newcomers.others and self._goes_on(now, name, begun[name])]
        self.newcomers.look_at_others(now, bool(helped or at_work))
        self._others_work = bool(
            helped
            or any(self._is_rested(now, name) and self._goes_on(now, name, begun[name]) for name in begun)
            or any(
                not self.newcomers.why_nothing(now, name) and self.newcomers.room(now, ledger) > 0 for name in rested
            )
        )

    def _goes_on(self, now: float, trainer: str, begun: tuple[int, float]) -> bool:
        """True unless a trainer has finished nothing of what it has begun for far longer than is usual."""
        return now - max(begun[1], self._done_at(trainer)) < self.newcomers.usual_s

    def _does_more(self, name: str, under_way: int, given: Mapping[str, int | None], ledger: Ledger) -> bool:
        """True when the others of a batch may leave the rest of it to this trainer.

        It works, or wishes for what it may have. One that gave back what it had of this batch may do so again.
        """
        works = under_way > 0 or given.get(name, 0) != 0
        return works and name not in self.newcomers and not ledger.given_back[name]

    def _in_order(self, now: float, ledger: Ledger, given: Mapping[str, int | None]) -> list[str]:
        """The trainers that wish for a microbatch and may get one, in the order in which they take turns."""
        others = [name for name, most in given.items() if name not in self.newcomers]
        # Trainers never measured come first, so that one step tells of them all; those that gave back some, last.
        others.sort(
            key=lambda name: (ledger.given_back[name], self._trainers[name].seconds > 0 and self.own_pace, name)
        )
        able = [name for name, most in given.items() if name in self.newcomers and most != 0]
        return [*self.newcomers.in_turn(now, able), *others]

    def _unplaced(self, trainer: str, ledgers: Sequence[Ledger], counted: Container[Mb]) -> set[int]:
        """The microbatches that the trainer wishes for and that have no place in a batch."""
        without = set(self._trainers[trainer].open).difference(*(one.by_trainer.get(trainer, ()) for one in ledgers))
        return {seq for seq in without if Mb(trainer, seq) not in counted}

    def _fits(self, trainer: str, seq: int, step: int) -> bool:
        """True unless the microbatch was begun for another step."""
        own = self._trainers[trainer]
        return own.bound_to == step or seq not in own.bound

    def _at_work(self, now: float, begun: dict[str, tuple[int, float]]) -> dict[str, WorkerPace]:
        """Trainers that wish for microbatches or have begun some, by name."""
        found, nothing = {}, (0, now)
        for name, trainer in self._trainers.items():
            count, since = begun.get(name, nothing)
            if trainer.open or count:
                pace = trainer.pace
                found[name] = WorkerPace(pace.seconds, count, now - max(since, pace.at))
        return found


def _in_turn(wishes: Iterable[tuple[str, tuple[int, ...]]], ledgers: Sequence[Ledger]) -> list[Mb]:
    """The wishes that have no place in a batch: the trainers' first ones, in this order, then their second ones."""
    found: list[tuple[int, int, Mb]] = []
    for place, (trainer, seqs) in enumerate(wishes):
        placed = [one.by_trainer.get(trainer, {}) for one in ledgers]
        due, other = placed[0], placed[-1]  # the same where there is one batch
        without = [turn for turn, seq in enumerate(seqs) if seq not in due and seq not in other]
        found += [(turn, place, Mb(trainer, seqs[turn])) for turn in without]
    return [mb for _, _, mb in sorted(found)]


def _begun(ledgers: Iterable[Ledger]) -> dict[str, tuple[int, float]]:
    """The result of `Ledger.begun`, of several batches together."""
    found: dict[str, tuple[int, float]] = {}
    for ledger in ledgers:
        for name, (count, since) in ledger.begun().items():
            others, before = found.get(name, (0, since))
            found[name] = others + count, min(since, before)
    return found


def _in_time(paces: Mapping[str, WorkerPace], trainer: str, workers: Set[str], left: int) -> bool:
    """True when the trainer would be done with one more soon after all `workers` and it, together, are done with it and
    what else is `left`. Nothing is left to those that have been late for as long as it would take.
    """
    own = paces[trainer]
    together = [own, *(paces[name] for name in workers if name != trainer and not _hangs(paces[name], own.seconds))]
    together_s = shared_in_s(left, together)
    if not own.seconds or together_s is None:
        return True
    free_in_s, seconds = own.free()
    return free_in_s + seconds <= together_s + min(worker.seconds for worker in together if worker.seconds)


def _hangs(pace: WorkerPace, seconds: float) -> bool:
    return pace.begun > 0 and pace.seconds > 0 and pace.waited_s > pace.begun * pace.seconds + seconds
