"""Gaps in the network filled by landmarks: near the truth, marked, and not moved far by one that lies."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.placement.network.landmarks import DELAY_S, RATE_BYTES_PER_S, delay_by_landmarks, filled
from peerd.placement.network.network_map import NOTHING, PairView
from peerd.placement.problem import Network


def view_of(pairs: dict[tuple[str, str], PairView]):  # type: ignore[no-untyped-def]
    def view(one: str, other: str) -> PairView:
        if (one, other) in pairs:
            return pairs[one, other]
        seen = pairs.get((other, one), NOTHING)
        return PairView(seen.rtt_s, seen.back, seen.there, seen.age_s)

    return view


def test_what_was_measured_stands_and_gaps_are_marked() -> None:
    pairs = {("a", "b"): PairView(0.02, 1e6, 2e6, 5.0), ("a", "c"): PairView(0.10, 3e6, None, 9.0)}
    found = filled("abc", view_of(pairs))
    assert found.rtt_s == [[0.0, 0.02, 0.10], [0.02, 0.0, 0.10], [0.10, 0.10, 0.0]]
    assert found.rtt_measured == [[True, True, True], [True, True, False], [True, False, True]]
    assert found.rate[0] == [math.inf, 1e6, 3e6]
    assert found.rate[1] == [2e6, math.inf, 2e6]  # b sends 2e6, c receives 3e6
    assert found.rate_measured[2] == [False, False, True]
    assert found.age_s[2][0] == 9.0


def test_what_is_filled_is_what_the_planner_takes() -> None:
    found = filled("abc", view_of({("a", "b"): PairView(0.02, 1e6, None), ("b", "c"): PairView(0.04)}))
    network = Network(np.array(found.rtt_s) / 2, np.array(found.rate))
    assert network.delay_s[0, 1] == 0.01
    assert (network.both_ways().rate > 0).all()
    assert np.isfinite(network.seconds(1e6)).all()


def test_where_nothing_is_known_all_pairs_are_alike_and_finite() -> None:
    found = filled("ab", lambda one, other: NOTHING)
    assert found.rtt_s[0][1] == DELAY_S
    assert found.rate[0][1] == RATE_BYTES_PER_S
    assert not found.rate_measured[0][1]
    assert found.rtt_guessed
    assert found.rate_guessed


def test_lines_count_where_pairs_were_not_measured() -> None:
    found = filled("ab", lambda one, other: NOTHING, {"a": (1e6, 0.0), "b": (0.0, 5e5)})
    assert found.rate[0][1] == 5e5
    assert found.rate[1][0] == RATE_BYTES_PER_S
    assert not found.rate_guessed


@given(
    st.lists(st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)), min_size=3, max_size=30),
    st.floats(1e-6, 60),
    st.floats(1e-6, 60),
)
def test_one_landmark_that_lies_moves_an_estimate_only_among_what_the_others_say(
    honest: list[tuple[float, float]], a: float, b: float
) -> None:
    lied = delay_by_landmarks([a, *(one for one, _ in honest)], [b, *(other for _, other in honest)])
    middles = [max(pair) for pair in honest]
    assert min(middles) <= lied <= max(middles)  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(3))
def test_delays_between_places_are_found_within_a_third(seed: int) -> None:
    rng = random.Random(seed)
    where = [(rng.uniform(0, 0.1), rng.uniform(0, 0.1)) for _ in range(30)]
    names = [f"p{i:02}" for i in range(30)]

    def truth(i: int, j: int) -> float:
        return 0.004 + math.dist(where[i], where[j])

    pairs = {(names[i], names[j]): PairView(truth(i, j)) for i in range(30) for j in range(i) if rng.random() < 0.4}
    found = filled(names, view_of(pairs))
    errors = [
        abs(found.rtt_s[i][j] / truth(i, j) - 1) for i in range(30) for j in range(i) if not found.rtt_measured[i][j]
    ]
    assert len(errors) > 200
    assert statistics.median(errors) < 0.33


def test_a_peer_that_claims_any_rate_from_one_other_does_not_lift_its_other_pairs() -> None:
    pairs = {
        ("a", "b"): PairView(0.01, 1e6, 1e6),
        ("a", "liar"): PairView(0.01, 1e11, 1e11),
        ("c", "d"): PairView(0.01, 1e9, 1e9),
    }
    found = filled(["a", "b", "c", "d", "liar"], view_of(pairs))
    assert found.rate[0][2] == 1e6
