"""Forecasts of a step's end: right at a constant pace, and possible whatever happens."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from peerd.core.limits import FORESEEABLE_S
from peerd.messages.swarm import Mb
from peerd.swarm.batch.admission import Admission
from peerd.swarm.batch.batch_ledger import BatchLedger, Counted
from peerd.swarm.batch.forecast import TrainerPace, WorkerPace, whole_in_s

SECONDS = st.floats(0.01, 1000.0)
WORKERS = st.lists(
    st.builds(WorkerPace, st.one_of(st.just(0.0), SECONDS), st.integers(0, 20), st.floats(-1.0, 1e7)), max_size=8
)


class Swarm:
    """Trainers that keep `in_flight` microbatches open and compute one at a time, each at a pace of its own."""

    def __init__(self, seconds: dict[str, float], batch: int, in_flight: int = 2) -> None:
        self.seconds, self.batch, self.in_flight = seconds, batch, in_flight
        self.admission = Admission(own_pace=True)
        self.now = 0.0
        self.ledger = BatchLedger(1, batch)
        self._number = 0
        self._begun: dict[str, list[tuple[float, Mb]]] = {name: [] for name in seconds}

    def come(self, name: str, seconds: float) -> None:
        self.seconds[name], self._begun[name] = seconds, []

    def go(self, name: str) -> None:
        del self.seconds[name], self._begun[name]
        self.admission.gone(name)
        for mb in [mb for mb in self.ledger.open_of(name) if not self.ledger.entries[mb].done]:
            self.ledger.drop(mb)

    def step(self) -> list[tuple[float, float | None]]:
        """A whole step: when each microbatch was done, and the forecast just after it."""
        self.ledger = BatchLedger(1, self.batch)
        for begun in self._begun.values():
            begun.clear()
        told = []
        while any(self.ledger.missing) or not self.ledger.full:
            told.append((self.now, self.one()))
        return [*told, (self.now, self.forecast())]

    def one(self) -> float | None:
        """Until the next microbatch is done; returns the forecast from before."""
        self._fill()
        told = self.forecast()
        self.now, mb = min(begun[0] for begun in self._begun.values() if begun)
        since = self.ledger.entries[mb].since
        self.ledger.finish(mb)
        self.ledger.hold(mb, 0, mb.trainer)
        self.admission.finished(self.now, mb.trainer, since)
        queue = self._begun[mb.trainer]
        del queue[0]
        if queue:
            queue[0] = (self.now + self.seconds[mb.trainer], queue[0][1])
        return told

    def _fill(self) -> None:
        for name, begun in self._begun.items():
            wishes = [mb.seq for _, mb in begun]
            while len(wishes) < self.in_flight:
                wishes.append(self._number)
                self._number += 1
            self.admission.report(name, tuple(wishes))
        for mb in self.admission.wishes(self.now, self.ledger, Counted()):
            self.ledger.admit(mb, self.now)
            queue = self._begun[mb.trainer]
            queue.append((self.now + self.seconds[mb.trainer] if not queue else math.inf, mb))

    def forecast(self) -> float | None:
        return self.admission.whole_in_s(self.now, self.ledger)


@given(SECONDS, st.integers(1, 40))
def test_one_trainer_at_a_constant_pace_is_foretold_exactly(seconds: float, batch: int) -> None:
    swarm = Swarm({"a": seconds}, batch)
    assert swarm.step()[0][1] is None  # nothing is known of it yet
    told = swarm.step()
    ended = told[-1][0]
    assert all(found is not None and math.isclose(at + found, ended, rel_tol=1e-6) for at, found in told), told


@given(st.lists(st.floats(0.5, 20.0), min_size=1, max_size=6), st.integers(1, 60))
def test_many_trainers_at_constant_paces_are_foretold_up_to_a_microbatch(paces: list[float], batch: int) -> None:
    swarm = Swarm({f"t{i}": pace for i, pace in enumerate(paces)}, batch)
    for _ in range(len(paces) + 2):
        swarm.step()
    told = swarm.step()
    ended = told[-1][0]
    wrong = [(at, found, ended) for at, found in told if found is None or abs(at + found - ended) > max(paces) + 1e-6]
    assert not wrong


@given(st.lists(st.floats(0.5, 20.0), min_size=2, max_size=6), st.integers(4, 40), st.randoms(use_true_random=False))
def test_a_forecast_is_possible_while_trainers_come_and_go(paces: list[float], batch: int, rng: random.Random) -> None:
    swarm = Swarm({f"t{i}": pace for i, pace in enumerate(paces)}, batch)
    swarm.step()
    for number in range(30):
        if rng.random() < 0.3:
            swarm.come(f"new{number}", rng.uniform(0.5, 20.0))
        if rng.random() < 0.3 and len(swarm.seconds) > 1:
            swarm.go(rng.choice(sorted(swarm.seconds)))
        if not any(swarm.ledger.missing) and swarm.ledger.full:
            swarm.ledger = BatchLedger(1, batch)
        told = swarm.one()
        assert told is None or 0 <= told <= FORESEEABLE_S
    for name in sorted(swarm.seconds)[1:]:
        swarm.go(name)
    swarm.step()
    told_then = swarm.step()
    off = [(at, found) for at, found in told_then if found is None or not math.isclose(at + found, swarm.now)]
    assert not off


@given(st.integers(0, 1000), WORKERS)
def test_a_forecast_is_never_negative_and_always_finite(left: int, workers: list[WorkerPace]) -> None:
    found = whole_in_s(left, workers)
    assert found is None or 0 <= found <= FORESEEABLE_S


@given(st.integers(0, 1000), WORKERS, SECONDS)
def test_a_further_trainer_at_work_never_makes_the_step_later_but_by_what_it_begins(
    left: int, workers: list[WorkerPace], seconds: float
) -> None:
    before, free = whole_in_s(left, workers), WorkerPace(seconds, 0, 0.0)
    after = whole_in_s(left, [*workers, free])
    known = all(worker.seconds > 0 for worker in workers)
    assert not known or before is None or (after is not None and after <= before * (1 + 1e-9))


def test_the_rest_is_shared_out_among_those_who_become_free() -> None:
    # `slow` is busy for 10 s and takes nothing more; `fast` does the other eight in 8 s.
    assert whole_in_s(8, [WorkerPace(1.0, 0, 0.0), WorkerPace(10.0, 1, 0.0)]) == 10.0
    # Both free at once: rates add up. One that is free at 3 s only helps from then on.
    assert whole_in_s(6, [WorkerPace(1.0, 0, 0.0), WorkerPace(2.0, 0, 0.0)]) == 4.0
    assert whole_in_s(6, [WorkerPace(1.0, 0, 0.0), WorkerPace(1.0, 3, 0.0)]) == 4.5


def test_nobody_knows_before_anything_was_measured_and_nothing_is_left_of_a_whole_batch() -> None:
    assert whole_in_s(5, [WorkerPace(0.0, 2, 1.0)]) is None
    assert whole_in_s(5, []) is None
    assert whole_in_s(0, []) == whole_in_s(0, [WorkerPace(1.0, 0, 5.0)]) == 0.0
    assert whole_in_s(10**6, [WorkerPace(1000.0, 0, 0.0)]) is None  # too far off for anybody to say


def test_a_newcomer_is_taken_to_be_as_fast_as_the_others() -> None:
    assert whole_in_s(8, [WorkerPace(2.0, 0, 0.0), WorkerPace(0.0, 0, 0.0)]) == 8.0


def test_who_is_late_is_believed_to_be_slow() -> None:
    at_work, stuck = WorkerPace(1.0, 1, 0.0), WorkerPace(1.0, 1, 9.0)
    assert whole_in_s(10, [at_work]) == 11.0
    found = whole_in_s(10, [at_work, stuck])
    assert found is not None
    assert 11 * 9 / 10 <= found < 11.0  # it is about to be done, and takes 9 s for the next one


def test_a_pace_counts_only_the_time_at_work() -> None:
    pace = TrainerPace()
    assert pace.seconds == 0.0
    for step in range(5):  # a microbatch of 2 s in each step of 100 s
        pace.finished(100.0 * step + 2.0, 100.0 * step)
    assert math.isclose(pace.seconds, 2.0)


def test_microbatches_of_one_report_share_its_time() -> None:
    pace = TrainerPace()
    for second in range(0, 300, 3):
        for _ in range(3):
            pace.finished(second + 3.0, second)
    assert math.isclose(pace.seconds, 1.0)


def test_a_pace_follows_a_trainer_that_has_become_slower() -> None:
    pace = TrainerPace()
    now = 0.0
    for seconds in [1.0] * 20 + [4.0] * 20:
        pace.finished(now + seconds, now)
        now += seconds
    assert 3.5 < pace.seconds < 4.0


def test_what_a_lost_peer_held_and_what_a_lost_trainer_had_begun_is_still_to_do() -> None:
    admission, ledger = Admission(own_pace=False), BatchLedger(2, 4)
    for name in ("a", "b"):
        admission.report(name, (1, 2))
        for seq in (1, 2):
            mb = Mb(name, seq)
            ledger.admit(mb, 0.0)
            for stage in (0, 1):
                ledger.hold(mb, stage, f"peer{stage}")
            admission.finished(10.0 * seq, name, 0.0)
    assert admission.whole_in_s(20.0, ledger) == 0.0
    ledger.lose("peer1", 20.0)
    assert admission.whole_in_s(20.0, ledger) == 20.0
    admission.gone("b")
    assert admission.whole_in_s(20.0, ledger) == 40.0
