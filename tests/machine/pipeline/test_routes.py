"""Fixed routes: a table of who follows whom leads through all stages, and names one peer for each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.machine.pipeline.route_policy import InTurn
from peerd.machine.pipeline.routes import FixedRoute, PlannedRoutes


@given(st.lists(st.permutations(range(5)), min_size=2, max_size=4))
def test_routes_of_a_matching_meet_every_peer_once(orders: list[list[int]]) -> None:
    stages = [[f"{stage}.{number}" for number in order] for stage, order in enumerate(orders)]
    follows = {a: b for one, other in pairwise(stages) for a, b in zip(one, other, strict=True)}
    for number, first in enumerate(stages[0]):
        route = FixedRoute(first, follows, len(stages))
        for stage, peers in enumerate(stages):
            assert route.allowed(stage, peers) == [peers[number]]
            assert route.allowed(stage, [name for name in peers if name != peers[number]]) == []


@pytest.mark.parametrize(
    ("follows", "told"),
    [({"a": "b"}, "ends at b, of stage 1; the run has 3"), ({"a": "b", "b": "a"}, "twice: a, b, a")],
)
def test_a_table_that_does_not_lead_through_the_stages_is_refused(follows: dict[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        FixedRoute("a", follows, 3)


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
