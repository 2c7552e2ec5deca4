"""Delivery-rate estimate of a path from samples: outliers do not move it, growth is seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.machine.rate.delivery_rate import PathRate


def after(*rates: float, samples: int = 8) -> PathRate:
    path = PathRate(samples)
    for rate in rates:
        path.add(rate)
    return path


def test_nothing_is_carried_before_anything_was_seen_and_there_may_be_more() -> None:
    assert PathRate(8).carried == 0
    assert PathRate(8).grows


def test_two_bursts_are_no_other_path_and_three_are() -> None:
    assert after(*[10.0] * 5, 90.0, 90.0).carried == 10.0
    assert after(*[10.0] * 5, 90.0, 90.0, 90.0).carried == 90.0


def test_it_grows_from_the_second_better_sample_until_two_bring_no_more() -> None:
    path, found = after(*[10.0] * 8), []
    for rate in (12.0, 12.0, 12.0, 12.0):
        path.add(rate)
        found.append(path.grows)
    assert found == [False, True, True, False]


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=40), st.integers(1, 16))
def test_what_is_carried_was_seen_among_the_newest_and_two_at_most_were_more(rates: list[float], samples: int) -> None:
    path, newest = after(*rates, samples=samples), rates[-samples:]
    assert path.carried in newest
    assert sum(rate > path.carried for rate in newest) <= 2
