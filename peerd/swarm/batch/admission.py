"""Admission of microbatches to the batch: trainers take turns, but none gets a microbatch that would hold up the step.

Where trainers compute for themselves (a model of one stage), each is as fast as its machine. A step ends when the last
admitted microbatch is done, so near its end a slow trainer gets no further one: the others could compute it sooner. In
pipelines the stages set the pace, and every request is accepted. Speeds are measured here from reports; a trainer's own
claims about its speed count for nothing. Invariant: of the trainers that request a microbatch, may have one and compute
none, the fastest gets the next one, so every batch is filled.

A trainer that did not finish its microbatches gets fewer (`TrainerLimit`), and its slots go to others once the step has
waited for it alone for long. Newcomers get few until they have helped to make a step (`Newcomers`), and nothing is
reserved for them. A trainer that is alone gets all that it requests, however slow it is: nobody else could compute it.
With each report, only trainers are checked whose requests may lack a slot: `wish_again` names those that lost one.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, KeysView, Mapping, Sequence, Set
from dataclasses import dataclass, field

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import LEASHED_TRAINERS
from peerd.messages.swarm import Mb
from peerd.swarm.batch.batch_ledger import BatchLedger
from peerd.swarm.batch.forecast import TrainerPace, WorkerPace, shared_in_s, whole_in_s
from peerd.swarm.batch.lateness import Lateness, Usual
from peerd.swarm.batch.newcomers import WAIT_S, Newcomers
from peerd.swarm.batch.trainer_limit import TrainerLimit

_TURN_KEEP = 0.7  # weight of the earlier value in the mean time from admission to end
_PATIENCE_MOST = 6  # doublings of patience while nobody finishes anything
_HALVINGS_MOST = 4  # of the lease of a trainer that held up steps


@dataclass(slots=True)
class _Trainer:
    open: tuple[int, ...] = ()  # requested or begun, in its order of preference
    bound: frozenset[int] = frozenset()  # of these, begun for step `bound_to` and valid for no other
    bound_to: int = 0
    pace: TrainerPace = field(default_factory=TrainerPace)
    turn_s: float = 0.0  # recent mean time from admission to end; 0: none yet

    @property
    def seconds(self) -> float:
        """Measured seconds per microbatch, or 0 if not measured yet."""
        return self.pace.seconds


class Admission:
    """Decides which trainers' requests for microbatches are admitted to the batch.

    `own_pace`: each trainer computes on its own machine, so trainers differ in speed; False: the stages set the pace.
    """

    def __init__(self, own_pace: bool) -> None:
        self.own_pace = own_pace
        self.resting: Set[str] = frozenset()  # trainers whose replicas contribute nothing for now
        self._trainers: dict[str, _Trainer] = {}
        self._leashes = BoundedDict[str, TrainerLimit](LEASHED_TRAINERS)
        self._first: str | None = None  # by name, or None if unknown
        self._wishing: dict[str, None] = {}  # trainers that may request something that has no slot in a batch
        self.newcomers = Newcomers()
        self._others_work = True  # some trainer that does not sit out computes, or may have what it requests
        self._patience = 0  # how often leases ran out since a trainer last finished anything
        self._ran_out_at = 0.0

    def seconds(self, trainer: str) -> float:
        """Measured seconds per microbatch of a trainer, or 0 if not measured yet."""
        known = self._trainers.get(trainer)
        return known.seconds if known is not None else 0.0

    def count(self) -> int:
        """Number of connected trainers."""
        return len(self._trainers)

    def __contains__(self, trainer: str) -> bool:
        return trainer in self._trainers

    @property
    def experienced(self) -> Set[str]:
        """The trainers at work that have helped to make a step; all connected ones if none of those is at work."""
        others = self.newcomers.others
        return (others - self.resting if self.resting else others) or self._trainers.keys()

    def absent(self, trainers: KeysView[str]) -> set[str]:
        """Those of `trainers` that are not connected."""
        return trainers - self._trainers.keys()

    def first(self) -> str | None:
        """The alphabetically first trainer, or None without trainers."""
        if self._first is None:
            self._first = min(self._trainers, default=None)
        return self._first

    def first_at_work(self) -> str | None:
        """The alphabetically first trainer that does not rest, or None if there is none."""
        return min(self._trainers.keys() - self.resting, default=None) if self.resting else self.first()

    def report(self, trainer: str, wishes: tuple[int, ...], bound: Iterable[int] = (), bound_to: int = 0) -> None:
        """Record what the trainer has requested or begun (`wishes`); those in `bound` are only for step `bound_to`."""
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
        """Consider the requests of these trainers, or of all, again, since microbatches have lost their slots."""
        again = self._trainers if trainers is None else trainers
        self._wishing |= {trainer: None for trainer in again if trainer in self._trainers}

    def finished(self, now: float, trainer: str, began: float) -> None:
        """Record that the trainer has finished a microbatch that was admitted at `began`."""
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
        """Rule for overdue microbatches as of now.

        `lease_s`: (lease if other trainers show the usual time, lease otherwise); `alone`: the batch has no room for
        anything else; `early`: the microbatches are of the next batch.
        """

        def usual() -> Usual:  # of those with open requests: others could not compute it instead
            trainers = self._trainers.items() if alone else ()
            return Usual({name: (t.turn_s, t.pace.at) for name, t in trainers if t.turn_s and t.open})

        patience = 2.0 ** min(self._patience, _PATIENCE_MOST)
        if early or not self.newcomers.are_waited_for:
            return Lateness(now, lease_s, self._least_lease(*lease_s), patience, usual, self._lease, self._done_at)

        def wait_ends(trainer: str) -> float | None:
            return self.newcomers.wait_ends(now, trainer) if trainer in self.newcomers else None

        return Lateness(now, lease_s, 0.0, patience, usual, self._lease, self._done_at, wait_ends)

    def look_for_waits(self, now: float, due: BatchLedger) -> None:
        """Record whether the step waits for newcomers alone while others would compute their part of the batch."""
        self.newcomers.look(now, due, lambda name: bool(self._unplaced(name, [due], ())))

    def _least_lease(self, lease: float, first: float) -> float:
        """Lower bound of the leases (`_lease`) of all connected trainers, in seconds."""
        if 0 < len(self.newcomers.others) < len(self._trainers):  # there are newcomers
            lease = min(lease, WAIT_S)
        return min(first, lease / 2.0**_HALVINGS_MOST if self._leashes else lease)

    def _lease(self, now: float, trainer: str, lease: float) -> float:
        """Seconds that a trainer may keep a microbatch until it is late. `lease`: the same without earlier failures."""
        if trainer in self.newcomers:
            return min(lease, self.newcomers.lease_s(trainer))
        leash = self._leashes.get(trainer)
        return lease / 2.0 ** min(leash.strikes if leash is not None else 0, _HALVINGS_MOST)

    def _done_at(self, trainer: str) -> float:
        """Time at which the trainer last finished something."""
        known = self._trainers.get(trainer)
        return known.pace.at if known is not None else -math.inf

    def ran_out(self, now: float) -> None:
        """Record that leases ran out. All of them double until a trainer finishes something, since all may be slow."""
        self._patience += now > self._ran_out_at
        self._ran_out_at = now

    def strike(self, now: float, trainer: str, under_way: int, *, proven: bool = False) -> int:
        """Record that the trainer held up the step with `under_way` microbatches: it gets fewer. Returns its strikes.

        `proven`: as in `Probation.failed`.
        """
        if trainer in self.newcomers:
            return self.newcomers.failed(now, trainer, proven=proven)
        leash = self._leashes.setdefault(trainer, TrainerLimit())
        known = self._trainers.get(trainer)
        return leash.strike(now, under_way, known is not None and known.turn_s > 0)

    def step_made(self, helped: Iterable[str]) -> None:
        """Record that these trainers helped to make a step; the limits of trainers that had held up steps rise."""
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
        """Reason that the trainer gets no microbatch now, or "" if it may have one."""
        if self._given(now, trainer) != 0:
            return ""
        leash = self._leashes.get(trainer)
        if leash is not None and leash.until > now:
            return "the end of a pause, since this trainer did not finish its microbatches in time"
        return self.newcomers.why_nothing(now, trainer)

    def _is_rested(self, now: float, trainer: str) -> bool:
        return trainer not in self._leashes or self._leashes[trainer].until <= now

    # --- filling ----------------------------------------------------------------------------------------------

    def whole_in_s(self, now: float, ledger: BatchLedger) -> float | None:
        """Seconds until the batch is complete, by what is not done and the pace of those at work. None if unknown."""
        begun = ledger.begun()
        dead = sum(count for name, (count, _) in begun.items() if name not in self._trainers)
        workers = self._at_work(now, begun)
        return whole_in_s(ledger.capacity - len(ledger.entries) + dead, workers.values())

    def wishes(
        self,
        now: float,
        ledger: BatchLedger,
        counted: Container[Mb],
        beside: BatchLedger | None = None,
        step: int = 0,
        summed: Set[str] = frozenset(),
    ) -> Iterator[Mb]:
        """Microbatches to admit to `step`'s batch while there is room. The caller admits each before it takes the next.

        `counted`: microbatches that a step has counted; `beside`: another step's batch, with other microbatches of the
        same trainers; `summed`: trainers whose gradients are in a sum that would have to be made again. These get
        nothing while others may have what they request.
        """
        if ledger.full or not self._wishing:
            return
        ledgers = [ledger] if beside is None else [ledger, beside]
        unplaced = {name: self._unplaced(name, ledgers, counted) for name in self._wishing}
        self._wishing = {name: None for name, seqs in unplaced.items() if seqs and name not in self.resting}
        if not self._wishing:  # most reports request nothing new
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
        left = self._wishing.keys() - trainers.keys()  # trainers whose requests get no slot now
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
                # Another newcomer of its place may have been admitted just now.
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
        self, now: float, wishing: Sequence[str], begun: Mapping[str, tuple[int, float]], ledger: BatchLedger
    ) -> dict[str, int | None]:
        """Number of microbatches that each of these trainers may have under way, or None if there is no limit."""
        self._look_who_works(now, wishing, begun, ledger)
        return {name: self._given(now, name) for name in wishing}

    def _look_who_works(
        self, now: float, wishing: Sequence[str], begun: Mapping[str, tuple[int, float]], ledger: BatchLedger
    ) -> None:
        """Record whether any trainer works, and whether any that has helped before works.

        A trainer works if it computes, or may have what it requests. If none works, trainers that pause, and newcomers,
        may get more than usual.
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
        """False if the trainer has finished none of its begun microbatches for far longer than usual."""
        return now - max(begun[1], self._done_at(trainer)) < self.newcomers.usual_s

    def _does_more(self, name: str, under_way: int, given: Mapping[str, int | None], ledger: BatchLedger) -> bool:
        """True if this trainer is expected to compute more of the batch: it computes now, or requests what it may have.

        A trainer that gave back microbatches of this batch is excluded, as it may do so again.
        """
        works = under_way > 0 or given.get(name, 0) != 0
        return works and name not in self.newcomers and not ledger.given_back[name]

    def _in_order(self, now: float, ledger: BatchLedger, given: Mapping[str, int | None]) -> list[str]:
        """The trainers that request a microbatch and may get one, in the order of their turns."""
        others = [name for name, most in given.items() if name not in self.newcomers]
        # Unmeasured trainers come first, so that one step measures them all; those that gave back some come last.
        others.sort(
            key=lambda name: (ledger.given_back[name], self._trainers[name].seconds > 0 and self.own_pace, name)
        )
        able = [name for name, most in given.items() if name in self.newcomers and most != 0]
        return [*self.newcomers.in_turn(now, able), *others]

    def _unplaced(self, trainer: str, ledgers: Sequence[BatchLedger], counted: Container[Mb]) -> set[int]:
        """Numbers of the microbatches that the trainer requests and that have no slot in a batch."""
        without = set(self._trainers[trainer].open).difference(*(one.by_trainer.get(trainer, ()) for one in ledgers))
        return {seq for seq in without if Mb(trainer, seq) not in counted}

    def _fits(self, trainer: str, seq: int, step: int) -> bool:
        """True unless the microbatch was begun for another step."""
        own = self._trainers[trainer]
        return own.bound_to == step or seq not in own.bound

    def _at_work(self, now: float, begun: dict[str, tuple[int, float]]) -> dict[str, WorkerPace]:
        """Trainers that request microbatches or have begun some, by name, with their pace."""
        found, nothing = {}, (0, now)
        for name, trainer in self._trainers.items():
            count, since = begun.get(name, nothing)
            if trainer.open or count:
                pace = trainer.pace
                found[name] = WorkerPace(pace.seconds, count, now - max(since, pace.at))
        return found


def _in_turn(wishes: Iterable[tuple[str, tuple[int, ...]]], ledgers: Sequence[BatchLedger]) -> list[Mb]:
    """Requests without a slot in a batch: the first one of each trainer in this order, then the second ones, ..."""
    found: list[tuple[int, int, Mb]] = []
    for place, (trainer, seqs) in enumerate(wishes):
        placed = [one.by_trainer.get(trainer, {}) for one in ledgers]
        due, other = placed[0], placed[-1]  # the same where there is one batch
        without = [turn for turn, seq in enumerate(seqs) if seq not in due and seq not in other]
        found += [(turn, place, Mb(trainer, seqs[turn])) for turn in without]
    return [mb for _, _, mb in sorted(found)]


def _begun(ledgers: Iterable[BatchLedger]) -> dict[str, tuple[int, float]]:
    """`BatchLedger.begun` for several batches together."""
    found: dict[str, tuple[int, float]] = {}
    for ledger in ledgers:
        for name, (count, since) in ledger.begun().items():
            others, before = found.get(name, (0, since))
            found[name] = others + count, min(since, before)
    return found


def _in_time(paces: Mapping[str, WorkerPace], trainer: str, workers: Set[str], left: int) -> bool:
    """True if the trainer would finish one more soon after all `workers`, itself included, finish what is `left`.

    Workers that are late by more than the time it needs for one are ignored, as nothing is left to them.
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
