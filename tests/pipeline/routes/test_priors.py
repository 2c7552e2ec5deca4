"""Expectations of peers that were never measured: on the scale of those that were, and no boast pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.pipeline.routes.priors import expected_s, usual_s

NAMES = st.sampled_from("abcdef")
FIGURES = st.dictionaries(NAMES, st.floats(1e-6, 1e9))


def test_a_peer_of_half_the_rate_is_expected_to_take_twice_as_long() -> None:
    assert expected_s({"a": 3.0}, {"a": 10.0, "b": 5.0}) == {"b": pytest.approx(6.0)}


def test_without_any_measurement_the_rates_themselves_count_and_a_boast_for_twice_the_usual() -> None:
    assert expected_s({}, {"a": 1.0, "b": 2.0, "c": 1e9, "d": 0.0}) == {"a": 1.0, "b": 0.5, "c": 0.25}


def test_nothing_is_expected_where_nobody_measured_has_a_rate() -> None:
    assert expected_s({"a": 3.0}, {"b": 5.0}) == {}


def test_a_usual_peer_is_the_middle_one_of_those_whose_rate_is_known() -> None:
    assert usual_s([]) == usual_s([0.0, 0.0]) == 0.0
    assert usual_s([0.0, 0.05, 0.1, 1e9]) == pytest.approx(10.0)


@given(FIGURES, st.dictionaries(NAMES, st.floats(0.0, 1e9)))
def test_only_strangers_with_a_rate_are_expected_to_take_any_time_and_none_less_than_the_fastest(
    measured_s: dict[str, float], rates: dict[str, float]
) -> None:
    found = expected_s(measured_s, rates)
    assert found.keys() <= {name for name, rate in rates.items() if rate > 0} - measured_s.keys()
    assert all(seconds >= min(measured_s.values()) for seconds in found.values() if measured_s)
    assert all(seconds <= 1000 * max(measured_s.values()) for seconds in found.values() if measured_s)
    assert all(0.0 < seconds < 1e10 for seconds in found.values() if not measured_s)
