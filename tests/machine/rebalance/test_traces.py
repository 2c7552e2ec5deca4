"""Rules under traces of preemption, as `bench.py rebalance` runs all of them."""

from __future__ import annotations

import pytest

from scripts.benchmarks import rebalance


def test_a_trace_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    shape = rebalance.Shape(60, 4, burst=4)
    assert rebalance.trace(shape, 1) == rebalance.trace(shape, 1)
    assert rebalance.trace(shape, 1) != rebalance.trace(shape, 2)


def test_queues_stand_before_the_weakest_stage() -> None:
    first, weakest, last = rebalance.queues_of([4.0, 2.0, 8.0], 100.0)
    assert first == pytest.approx(1.0)  # used by half
    assert last == pytest.approx(1 / 3)
    assert first + weakest + last == pytest.approx(100.0)


@pytest.mark.slow
@pytest.mark.parametrize("burst", [1, 10])
def test_ours_loses_a_third_of_what_algorithm_2_loses_with_a_quarter_of_its_moves(burst: int) -> None:
    found = rebalance.measured(rebalance.Shape(60, 4, burst), seeds=2)
    ours, theirs = found["ours"], found["algorithm2_300"]
    assert found["none"]["percent"] < theirs["percent"] < ours["percent"] < 100.0
    assert 100.0 - ours["percent"] <= (100.0 - theirs["percent"]) / 3
    assert ours["moves"] <= theirs["moves"] / 4
