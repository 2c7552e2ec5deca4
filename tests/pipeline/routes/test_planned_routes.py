"""Routes by a plan: planned followers come first, as far as they may be asked."""

from __future__ import annotations

from peerd.pipeline.routes.planned_routes import PlannedRoutes
from tests.worlds.machines.in_turn import InTurn


def never_cut(one: str, other: str) -> bool:
    return False


def test_planned_followers_come_first_as_far_as_they_may_be_asked() -> None:
    planned = PlannedRoutes(InTurn(), {"a": ["y"], "b": ["z", "x"], "y": ["q"]})
    assert planned.choose(0.0, [["a", "b"], ["x", "y", "z"], ["p", "q"]], never_cut) == ["a", "y", "q"]
    assert planned.choose(0.0, [["b"], ["x", "y", "z"], ["p", "q"]], never_cut) == ["b", "x", "p"]
    assert planned.choose(0.0, [["b"], ["y", "z"], ["p", "q"]], never_cut) == ["b", "z", "p"]
    assert planned.choose(0.0, [["a"], ["x", "z"], ["p", "q"]], never_cut) == ["a", "x", "p"]  # y is away
    assert planned.choose(0.0, [["c"], ["x", "y"]], never_cut) == ["c", "x"]  # c is not in the plan


def test_a_planned_follower_that_is_cut_off_is_passed_over() -> None:
    planned = PlannedRoutes(InTurn(), {"a": ["y"]})
    assert planned.choose(0.0, [["a"], ["x", "y"]], lambda one, other: (one, other) == ("a", "y")) == ["a", "x"]
