"""Fixed routes: a table of who follows whom leads through all stages, and names one peer for each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.machine.pipeline.routes import FixedRoute


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
