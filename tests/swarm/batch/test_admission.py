"""Filling a batch: in turn in pipelines, by pace where trainers compute for themselves."""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.messages.swarm import Mb
from peerd.swarm.batch.admission import Admission
from peerd.swarm.batch.batch_ledger import BatchLedger, Counted


def fill(admission: Admission, ledger: BatchLedger, now: float) -> list[Mb]:
    taken = []
    for mb in admission.wishes(now, ledger, Counted()):
        ledger.admit(mb, now)
        taken.append(mb)
    return taken


def run_steps(
    seconds: dict[str, float], batch: int, steps: int, own_pace: bool, joins: Mapping[str, int] | None = None
) -> float:
    """Seconds of the last step when every trainer keeps two microbatches open and computes one at a time.

    `joins`: the number of the step from which on a trainer is there, where that is not the first one.
    """
    admission, number, took = Admission(own_pace), 0, 0.0
    open_: dict[str, list[int]] = {}
    now = 0.0
    for step in range(steps):
        open_ |= {name: [] for name in seconds if (joins or {}).get(name, 0) == step}
        ledger, begun_at, busy = BatchLedger(1, batch), now, dict.fromkeys(open_, False)
        admitted: dict[str, list[tuple[Mb, float]]] = {name: [] for name in open_}
        due: list[tuple[float, str, Mb, float]] = []
        done = 0
        while done < batch:
            for name, wishes in open_.items():
                while len(wishes) < 2:
                    wishes.append(number)
                    number += 1
                admission.report(name, tuple(wishes))
            for mb in fill(admission, ledger, now):
                admitted[mb.trainer].append((mb, now))
            for name, queue in admitted.items():
                if queue and not busy[name]:
                    mb, since = queue.pop(0)
                    heapq.heappush(due, (now + seconds[name], name, mb, since))
                    busy[name] = True
            assert due, "nobody computes and the batch is not full"
            now, name, mb, since = heapq.heappop(due)
            busy[name] = False
            ledger.finish(mb)
            ledger.hold(mb, 0, name)
            admission.finished(now, name, since)
            open_[name].remove(mb.seq)
            done += 1
        admission.step_made({mb.trainer for mb in ledger.entries})
        took = now - begun_at
    return took


def test_in_a_pipeline_trainers_take_turns() -> None:
    admission, ledger = Admission(own_pace=False), BatchLedger(2, 5)
    admission.report("b", (10, 11, 12))
    admission.report("a", (1, 2))
    assert fill(admission, ledger, 0.0) == [Mb("a", 1), Mb("b", 10), Mb("a", 2), Mb("b", 11), Mb("b", 12)]


def test_trainers_whose_gradients_are_summed_work_on_where_others_may_have_nothing() -> None:
    admission, ledger = Admission(own_pace=True), BatchLedger(1, 4)
    for name in ("a", "b"):
        admission.report(name, (1, 2))
    ledger.admit(Mb("a", 1), 0.0)
    admission.strike(0.0, "b", 0)
    assert {mb.trainer for mb in admission.wishes(0.0, ledger, Counted(), summed={"a"})}


def test_a_slow_trainer_does_not_hold_up_the_end_of_a_step() -> None:
    seconds = {"a": 1.0, "b": 1.0, "c": 2.0, "d": 5.0}
    ideal = 32 / sum(1 / each for each in seconds.values())
    assert run_steps(seconds, 32, 4, own_pace=True) <= ideal + 2.0
    assert run_steps({"a": 1.0, "b": 100.0}, 8, 4, own_pace=True) <= 9.0
    assert run_steps({"a": 1.0, "b": 100.0}, 8, 4, own_pace=False) >= 100.0


@given(
    st.lists(st.floats(0.1, 100.0), min_size=1, max_size=8),
    st.integers(1, 64),
)
def test_every_batch_is_filled_and_ends_in_time(speeds: list[float], batch: int) -> None:
    seconds = {f"t{i}": each for i, each in enumerate(speeds)}
    # Once speeds are known: what is under way at the end is the fastest trainers' own work.
    best = sorted(number * each for each in speeds for number in range(1, batch + 1))[batch - 1]
    assert run_steps(seconds, batch, len(speeds) + 2, own_pace=True) <= best + 4 * min(speeds) * 1.01


def test_the_rest_of_a_batch_is_not_left_to_a_quick_newcomer_that_gets_no_more_of_it() -> None:
    assert run_steps({"old": 1.0, "new": 0.1}, 8, 2, own_pace=True, joins={"new": 1}) <= 6.0


@pytest.mark.parametrize("why", ["wishes for nothing", "sits out"])
@pytest.mark.parametrize("own_pace", [False, True])
def test_newcomers_get_a_whole_batch_when_those_who_have_helped_do_nothing(why: str, own_pace: bool) -> None:
    admission, ledger, done, now = Admission(own_pace), BatchLedger(1, 8), list[float](), 0.0
    admission.report("old", (1,))
    admission.step_made({"old"})
    if why == "sits out":
        admission.strike(now, "old", 1)
    else:
        admission.report("old", ())
    admission.report("new", tuple(range(100, 200)))
    while not ledger.full and now < 20:
        for mb in fill(admission, ledger, now):
            assert mb.trainer == "new"
            ledger.finish(mb)
            admission.finished(now + 0.1, "new", now)
            done.append(now)
        now += 0.1
    assert [at < 1 for at in done] == [True] * 2 + [False] * 6  # at first a quarter
    assert done[-1] < 5


@given(
    st.lists(st.tuples(st.floats(0.01, 100.0), st.integers(0, 3)), min_size=1, max_size=8),
    st.integers(1, 64),
    st.booleans(),
)
def test_every_batch_is_filled_when_newcomers_of_any_speed_join(
    trainers: list[tuple[float, int]], batch: int, own_pace: bool
) -> None:
    seconds = {f"t{number}": each for number, (each, _) in enumerate(trainers)}
    joins = {f"t{number}": step for number, (_, step) in enumerate(trainers)}
    joins["t0"] = 0  # somebody has to be there
    took = run_steps(seconds, batch, 6, own_pace, joins)
    assert 0 < took <= 1.001 * batch * max(seconds.values()), "at some time nobody computed"


@pytest.mark.parametrize("own_pace", [False, True])
def test_a_trainer_that_is_gone_is_not_waited_for(own_pace: bool) -> None:
    admission, ledger = Admission(own_pace), BatchLedger(1, 4)
    admission.report("a", (1, 2))
    admission.report("b", (5, 6))
    fill(admission, ledger, 0.0)
    admission.finished(1.0, "a", 0.0)
    admission.gone("a")
    assert "a" not in admission
    assert admission.first() == "b"
    admission.finished(2.0, "a", 0.0)  # a late word of it changes nothing
    admission.report("b", (5, 6, 7, 8))
    for mb in list(ledger.open_of("a")):
        ledger.drop(mb)
    assert [mb.trainer for mb in fill(admission, ledger, 3.0)] == ["b", "b"]


def test_a_slow_trainer_is_given_less_only_while_there_are_others_to_do_the_rest() -> None:
    admission, wishes = Admission(own_pace=False), tuple(range(8))
    admission.report("slow", wishes)
    admission.finished(90.0, "slow", 0.0)
    admission.strike(300.0, "slow", under_way=6)
    assert len(fill(admission, BatchLedger(1, 8), 300.0)) == 8
    admission.report("slow", wishes)
    admission.report("other", wishes)
    given = [mb.trainer for mb in fill(admission, BatchLedger(1, 8), 300.0)]
    assert (given.count("slow"), given.count("other")) == (3, 5)
    admission.gone("other")
    admission.wish_again()
    assert len(fill(admission, BatchLedger(1, 8), 301.0)) == 8


def test_what_the_last_batches_counted_is_not_admitted_again() -> None:
    admission, ledger, counted = Admission(own_pace=False), BatchLedger(1, 4), Counted()
    admission.report("a", (1, 2, 3))
    for step in range(5):
        counted.add(step, {"a": [1], "b": [step]} if step == 0 else {"b": [step]})
    assert list(admission.wishes(0.0, ledger, counted)) == [Mb("a", 2), Mb("a", 3)]


def test_trainers_get_places_in_turn_each_by_its_own_order_also_after_some_have_theirs() -> None:
    admission, ledger = Admission(own_pace=False), BatchLedger(1, 20)
    for name, wishes in (("a", (1, 2, 3, 4)), ("b", (11, 12, 11)), ("c", (21,))):
        admission.report(name, wishes)
    for mb in (Mb("a", 1), Mb("a", 3), Mb("c", 21)):
        ledger.admit(mb, 0.0)
    assert fill(admission, ledger, 1.0) == [Mb("b", 11), Mb("a", 2), Mb("b", 12), Mb("a", 4)]
    assert fill(admission, ledger, 2.0) == []


@given(st.randoms(use_true_random=False))
def test_whoever_is_late_is_among_those_that_are_looked_at(rng: random.Random) -> None:
    admission = Admission(own_pace=False)
    for name in "abc":
        admission.report(name, ())
    for name in "ab":
        if rng.random() < 0.7:
            admission.finished(rng.uniform(0, 20), name, 0.0)
    admission.step_made(rng.sample("abc", rng.randrange(3)))
    for _ in range(rng.randrange(4)):
        admission.strike(20.0, rng.choice("abc"), 3)
        admission.ran_out(rng.uniform(0, 30))
    late = admission.lateness(40.0, (rng.uniform(1, 30), rng.uniform(1, 30)), alone=rng.random() < 0.7)
    for since in (rng.uniform(0, 40) for _ in range(20)):
        assert since <= late.since or not any(late.is_overdue(name, since) for name in "abc")


def test_batches_are_remembered_for_a_while_and_forgotten_when_the_past_is_uncertain() -> None:
    counted = Counted()
    for step in range(100):
        counted.add(step, {"a": [step], "b": [step]})
    assert counted.of("a", 99) == [99]
    assert counted.of("nobody", 99) == []
    assert counted.of("a", 90) == [90]
    assert counted.of("a", 10) is None
    counted.restart(60, [Mb("b", 7)])
    assert (counted.of("a", 60), counted.of("b", 60), counted.of("a", 99)) == ([], [7], None)
