"""Rules under traces of preemption, as `bench.py rebalance` runs all of them."""

from __future__ import annotations

import pytest

from peerd.swarm.rebalance.loads import Transfer
from scripts.benchmarks import rebalance
from scripts.benchmarks._queue_rule import QueuedLoad, QueueRule


def test_a_trace_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    shape = rebalance.Shape(60, 4, burst=4)
    assert rebalance.trace(shape, 1) == rebalance.trace(shape, 1)
    assert rebalance.trace(shape, 1) != rebalance.trace(shape, 2)


def test_queues_stand_before_the_weakest_stage() -> None:
    first, weakest, last = rebalance.queues_of([4.0, 2.0, 8.0], 100.0)
    assert first == pytest.approx(1.0)  # used by half
    assert last == pytest.approx(1 / 3)
    assert first + weakest + last == pytest.approx(100.0)


def queued(*stages: dict[str, float]) -> list[QueuedLoad]:
    return [QueuedLoad(peer, stage, 1.0, queue=queue) for stage, of in enumerate(stages) for peer, queue in of.items()]


def test_algorithm_2_moves_the_smallest_queue_of_the_lightest_stage_to_the_heaviest() -> None:
    rule = QueueRule(3, 300.0)
    loads = queued({"a": 4, "b": 4}, {"c": 1, "d": 0}, {"e": 9})
    assert rule.look(299.0, loads) == []
    assert rule.look(300.0, loads) == [Transfer("d", 1, 2)]
    assert rule.look(301.0, loads) == []  # one move in a period
    assert rule.due(301.0) == 600.0
    assert rule.join(loads) == 2


@pytest.mark.parametrize(
    ("stages", "moves"),
    [
        ([{"b": 2, "a": 2}, {"c": 4}], []),  # all sums are the same
        ([{"b": 0, "a": 0}, {"c": 0, "d": 0}, {"e": 3}, {"f": 3}], [Transfer("a", 0, 2)]),  # the first of equals counts
        ([{"a": 0}, {"b": 5, "c": 5}], []),  # the last peer of a stage stays
    ],
)
def test_algorithm_2_compares_strictly(stages: list[dict[str, float]], moves: list[Transfer]) -> None:
    assert QueueRule(len(stages), 1.0).look(1.0, queued(*stages)) == moves


@pytest.mark.slow
@pytest.mark.parametrize("burst", [1, 10])
def test_ours_loses_a_third_of_what_algorithm_2_loses_with_a_quarter_of_its_moves(burst: int) -> None:
    found = rebalance.measured(rebalance.Shape(60, 4, burst), seeds=2)
    ours, theirs = found["ours"], found["algorithm2_300"]
    assert found["none"]["percent"] < theirs["percent"] < ours["percent"] < 100.0
    assert 100.0 - ours["percent"] <= (100.0 - theirs["percent"]) / 3
    assert ours["moves"] <= theirs["moves"] / 4
