"""Requests for one expert merge into batches, the oldest first, and no caller keeps others waiting."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import LocalError, Overloaded
from peerd.experts.rules.merge_queue import MergeQueue, QueueBounds, Queued

Queue = MergeQueue[str, int]


def queue(max_batch: int = 8, per_caller: int = 1000, in_all: int = 10_000) -> Queue:
    return MergeQueue(QueueBounds(max_batch=max_batch, per_caller=per_caller, in_all=in_all))


def ask(line: str, caller: str, number: int = 0, samples: int = 1, cost: float = 0.0) -> Queued[str, int]:
    return Queued(line, caller, samples, cost or samples, number)


def numbers(batch: object) -> list[int]:
    return [one.request for one in batch]  # type: ignore[attr-defined]


def test_requests_of_all_callers_for_one_expert_make_one_batch() -> None:
    q = queue()
    for number, caller in enumerate("abc"):
        assert q.put(0.0, ask("0.1 forward", caller, number, samples=2)) is None
    assert q.put(0.0, ask("0.1 backward", "a", 9)) is None
    assert [numbers(q.take()), numbers(q.take()), numbers(q.take())] == [[0, 1, 2], [9], []]


def test_a_batch_holds_no_more_samples_than_it_may() -> None:
    q = queue(max_batch=4)
    for number, samples in enumerate((3, 3, 1, 4)):
        q.put(0.0, ask("x", f"caller {number}", number, samples))
    assert [numbers(q.take()) for _ in range(3)] == [[0, 2], [1], [3]]


def test_nothing_overtakes_another_request_of_its_caller() -> None:
    q = queue(max_batch=4)
    for number, samples in enumerate((3, 3, 1)):
        q.put(0.0, ask("x", "a", number, samples))
    assert [numbers(q.take()) for _ in range(2)] == [[0], [1, 2]]


def test_the_line_whose_first_request_is_the_oldest_comes_first() -> None:
    q = queue(max_batch=2)
    for number, (line, caller) in enumerate([("x", "a"), ("y", "b"), ("z", "c"), ("y", "d"), ("x", "e")]):
        q.put(float(number), ask(line, caller, number))
    assert [numbers(q.take()) for _ in range(3)] == [[0, 4], [1, 3], [2]]


def test_a_caller_that_floods_waits_behind_its_own_requests_alone() -> None:
    q = queue(max_batch=1)
    for number in range(500):
        q.put(0.0, ask(f"expert {number % 7}", "flood", number))
    q.take()
    for number in range(3):
        q.put(1.0, ask("expert 0", "quiet", 1000 + number))
    assert [numbers(q.take())[0] >= 1000 for _ in range(6)].count(True) >= 2


def test_requests_beyond_a_callers_bound_or_that_of_all_are_refused_with_a_time_to_come_again() -> None:
    q = queue(max_batch=1, per_caller=2, in_all=3)
    assert [q.put(0.0, ask("x", "a")), q.put(0.0, ask("y", "a"))] == [None, None]
    mine = q.put(0.0, ask("z", "a"))
    assert isinstance(mine, Overloaded)
    assert "2 of your requests are waiting" in str(mine)
    assert q.put(0.0, ask("x", "b")) is None
    assert "3 requests are waiting; allowed: 3" in str(q.put(0.0, ask("x", "c")))
    q.served(1.0, 10.0)
    refusal = q.objection("a")
    assert refusal is not None
    assert refusal.retry_after_s == 15.0
    assert q.wait_s() == 30.0
    with pytest.raises(LocalError):
        q.objection("a", samples=2)


def test_a_request_that_was_withdrawn_is_in_no_batch_and_counts_for_its_caller() -> None:
    q = queue(max_batch=1)
    first, other = ask("x", "a", 0, cost=5.0), ask("x", "b", 1)
    q.put(0.0, first)
    q.put(0.0, other)
    assert q.withdraw(first)
    assert not q.withdraw(first)
    q.put(0.0, ask("x", "a", 2))
    assert [numbers(q.take()) for _ in range(3)] == [[1], [2], []]
    assert not q.withdraw(other)


def test_a_line_is_cleared_as_a_whole() -> None:
    q = queue()
    for number in range(3):
        q.put(0.0, ask("xy"[number % 2], "a", number))
    assert numbers(q.clear("x")) == [0, 2]
    assert numbers(q.take()) == [1]
    assert len(q) == 0


steps = st.lists(
    st.tuples(st.sampled_from("ppppttw"), st.integers(0, 3), st.sampled_from("xyz"), st.integers(1, 4)), max_size=120
)


@given(steps)
def test_whatever_comes_nothing_is_lost_doubled_or_out_of_bounds(schedule: list[tuple[str, int, str, int]]) -> None:
    q, waiting, served = queue(max_batch=4, per_caller=9, in_all=20), dict[int, Queued[str, int]](), list[int]()
    in_line: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, (kind, caller, line, samples) in enumerate(schedule):
        if kind == "p":
            queued = ask(line, f"c{caller}", number, samples)
            if q.put(float(number), queued) is None:
                waiting[number] = queued
                in_line[line, queued.caller].append(number)
        elif kind == "w" and waiting:
            gone = waiting.pop(sorted(waiting)[caller % len(waiting)])
            assert q.withdraw(gone)
            in_line[gone.line, gone.caller].remove(gone.request)
        elif kind == "t":
            batch = q.take()
            assert bool(batch) == bool(waiting)
            assert sum(one.samples for one in batch) <= 4
            assert len({one.line for one in batch}) <= 1
            for one in batch:
                assert waiting.pop(one.request) is one
                assert in_line[one.line, one.caller].pop(0) == one.request
            served += numbers(batch)
        q.check()
        assert len(q) == len(waiting)
    assert len(served) == len(set(served))


@given(st.integers(1, 6), st.integers(0, 40), st.integers(1, 3))
def test_a_newcomer_is_served_before_any_other_caller_had_two_of_its_requests_served(
    others: int, backlog: int, lines: int
) -> None:
    q = queue(max_batch=1)
    for number in range(backlog * others):
        q.put(0.0, ask(f"line {number % lines}", f"other {number % others}", number))
    for _ in range(min(3, backlog)):
        q.take()
    q.put(1.0, ask("line 0", "newcomer", -1))
    before = list[str]()
    while (batch := q.take())[0].caller != "newcomer":
        before.append(batch[0].caller)
    assert all(before.count(caller) <= 2 for caller in before)


def test_a_line_that_is_held_waits_and_comes_in_its_turn_when_it_is_released() -> None:
    q = queue(max_batch=2)
    q.put(0.0, ask("x", "a", 1))
    q.hold("x")
    q.put(1.0, ask("y", "b", 2))
    q.put(2.0, ask("x", "c", 3))
    q.check()
    assert [numbers(q.take()), numbers(q.take())] == [[2], []]
    assert len(q) == 2
    q.check()
    q.release("x")
    q.put(3.0, ask("z", "d", 4))
    q.check()
    assert [numbers(q.take()) for _ in range(3)] == [[1, 3], [4], []]


def test_a_line_that_is_cleared_is_held_no_more() -> None:
    q = queue()
    q.hold("x")
    q.put(0.0, ask("x", "a", 1))
    assert numbers(q.clear("x")) == [1]
    q.put(0.0, ask("x", "a", 2))
    assert numbers(q.take()) == [2]
    q.release("x")
    q.check()
