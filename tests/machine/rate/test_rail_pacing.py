"""Pacing of a link's rails together: free while the rate grows, then little faster than the path's delivery rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.machine.rate.rail_count import RailPace

RAILS = 4


class Rails:
    """Rails of one link whose acknowledged bytes the test says, looked at as a link does."""

    def __init__(self, rtt_s: float = 0.3) -> None:
        self.pace, self.rtt_s, self.now, self.acked = RailPace(), rtt_s, 0.0, 0

    def at(self, bytes_per_s: float, rails: int = RAILS) -> float:
        """Go on at that rate until the next look; what all may send together then."""
        pause_s = self.pace.pause_s(self.rtt_s)
        self.now += pause_s
        self.acked += int(bytes_per_s * pause_s)
        return self.pace.look(self.now, self.rtt_s, self.acked, rails) * rails

    def started(self, bytes_per_s: float) -> Rails:
        for _ in range(20):
            self.at(bytes_per_s)
        return self


def test_a_rate_that_grows_is_not_held_back() -> None:
    rails = Rails()
    assert {rails.at(1e6 * 2**step) for step in range(10)} == {math.inf}


def test_once_it_stands_a_third_more_than_was_carried_may_leave() -> None:
    assert Rails().started(60e6).at(60e6) == pytest.approx(80e6)


def test_each_rail_has_its_share() -> None:
    rails = Rails().started(60e6)
    assert rails.at(60e6, 12) == pytest.approx(rails.at(60e6, 3))


def test_what_is_acknowledged_late_and_at_once_is_not_another_path() -> None:
    rails = Rails().started(60e6)
    assert rails.at(10e6) == pytest.approx(80e6)
    assert rails.at(500e6) == pytest.approx(80e6)
    assert rails.at(60e6) == pytest.approx(80e6)


def test_a_path_that_becomes_faster_is_found_to_be() -> None:
    rails = Rails().started(60e6)
    rails.at(80e6)
    assert rails.at(80e6) == math.inf


def test_a_path_that_becomes_slower_is_believed_after_a_while() -> None:
    rails = Rails().started(200e6)
    allowed = [rails.at(60e6) for _ in range(20)]
    assert allowed[0] == pytest.approx(200e6 * 4 / 3)
    assert allowed[-1] == pytest.approx(80e6)


def test_a_slow_path_is_not_made_slower() -> None:
    assert Rails().started(1e6).at(1e6) == pytest.approx(40e6 * 4 / 3)


def test_a_pause_says_nothing_of_the_path() -> None:
    rails = Rails().started(60e6)
    for _ in range(30):
        rails.now += 10.0
        assert rails.at(60e6) == pytest.approx(80e6)


def test_a_rail_that_went_with_its_count_says_nothing_of_the_path() -> None:
    rails = Rails().started(60e6)
    rails.acked //= 4
    assert rails.at(0) == pytest.approx(80e6)
    assert rails.at(60e6) == pytest.approx(80e6)


def test_without_rails_nothing_is_held_back() -> None:
    assert RailPace().look(1.0, 0.1, 0, 0) == math.inf


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 1 << 40), st.integers(0, 12)), max_size=60), st.floats(0, 1)
)
def test_whatever_is_counted_some_rate_is_left(looks: list[tuple[float, int, int]], rtt_s: float) -> None:
    pace, now = RailPace(), 0.0
    for passed_s, acked, rails in looks:
        now += passed_s
        assert pace.look(now, rtt_s, acked, rails) * max(rails, 1) >= 40e6
