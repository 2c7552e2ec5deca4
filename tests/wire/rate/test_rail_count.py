"""Number of a link's rails: further connections on long fat paths, and on no others.
Pacing of a link's rails together: free while the rate grows, then little faster than the path's delivery rate.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.limits import RAILS_PER_LINK
from peerd.wire.rate.rail_count import RailPace, RailPlan

MBIT = 125_000

RAILS = 4


class Line:
    """A transfer whose rate the test sets, looked at as a link does."""

    def __init__(self, rtt_s: float) -> None:
        self.plan, self.rtt_s = RailPlan(0.0), rtt_s
        self.now, self.bytes, self.rails, self.why = 0.0, 0, 0, ""

    def at(self, mbit_s: float, seconds: float | None = None, waiting_bytes: int = 0) -> int:
        """Go on at that rate for so long (one pause) and look, while so much waits."""
        pause_s = self.plan.pause_s(self.rtt_s) if seconds is None else seconds
        self.now += pause_s
        self.bytes += int(mbit_s * MBIT * pause_s)
        self.rails, self.why = self.plan.look(self.now, self.rtt_s, (self.bytes, 0), self.rails, waiting_bytes)
        return self.rails


def test_a_long_fat_path_gets_several_while_the_flow_still_grows() -> None:
    line = Line(0.1)
    assert [line.at(rate) for rate in (5, 10, 20)] == [0, 0, 0]
    assert line.at(40) == 4
    assert "in flight" in line.why


def test_a_longer_path_gets_more() -> None:
    line = Line(0.3)
    assert [line.at(rate) for rate in (3, 6, 12)][-1] == RAILS_PER_LINK


def test_a_line_that_one_connection_fills_keeps_one() -> None:
    line = Line(0.1)
    assert [line.at(rate) for rate in (18, 19, 20, 20, 20)] == [0] * 5
    slow = Line(0.1)
    slow.at(19)
    assert slow.at(22) == 0
    assert slow.why == "one connection fills the path"


def test_a_flow_near_what_a_connection_holds_gets_more_though_it_no_longer_grows() -> None:
    line = Line(0.02)
    assert [line.at(600) for _ in range(3)][-1] == 2


def test_a_far_peer_gets_several_as_soon_as_much_waits() -> None:
    line = Line(0.3)
    assert line.at(0.1, waiting_bytes=100_000) == 0
    assert line.at(0.1, waiting_bytes=1 << 20) == RAILS_PER_LINK
    assert line.why == "much waits for a far peer"
    assert [line.at(rate, waiting_bytes=1 << 20) for rate in [1 << step for step in range(10)]] == [RAILS_PER_LINK] * 10
    assert [line.at(500, waiting_bytes=1 << 20) for _ in range(100)] == [RAILS_PER_LINK] * 100


def test_however_much_waits_nearer_lines_are_looked_at_first() -> None:
    line = Line(0.1)
    assert [line.at(20, waiting_bytes=1 << 24) for _ in range(100)] == [0] * 100
    assert line.plan.trial_bytes(line.now, 0.1, 0) == float("inf")


def test_a_far_line_that_one_connection_fills_keeps_one_after_a_trial_and_is_not_tried_again_and_again() -> None:
    line = Line(0.3)
    rails = [line.at(10, waiting_bytes=1 << 20) for _ in range(200)]  # a minute
    assert rails[0] == RAILS_PER_LINK
    assert rails[20:] == [0] * 180
    assert line.plan.trial_bytes(line.now, 0.3, 0) == float("inf")
    assert line.plan.trial_bytes(line.now + 60, 0.3, 0) < float("inf")


def test_far_peers_are_looked_at_sooner() -> None:
    assert RailPlan(0.0).look_bytes(0.3) < RailPlan(0.0).look_bytes(0.1) == RailPlan(0.0).look_bytes(None)


@pytest.mark.parametrize("rtt_s", [0.0001, 0.01])
def test_near_peers_get_none_however_fast(rtt_s: float) -> None:
    line = Line(rtt_s)
    assert [line.at(rate) for rate in (100, 1000, 5000)] == [0, 0, 0]
    assert line.why == "the path is short"


def test_a_faster_line_gets_more_later_and_never_too_many() -> None:
    line = Line(0.1)
    assert [line.at(rate) for rate in (20, 40, 400, 800, 900, 4000, 4000)] == [0, 4, 4, 4, 5, 6, RAILS_PER_LINK]


def test_idle_rails_are_closed_and_busy_ones_are_not() -> None:
    line = Line(0.1)
    for rate in (20, 40, 100):
        line.at(rate)
    assert line.at(0, 20.0) == 4
    assert line.at(100) == 4
    assert line.at(0, 31.0) == 0
    assert line.why == "the path is idle"


def test_after_a_failure_it_is_tried_again_later_and_ever_later() -> None:
    line = Line(0.1)
    line.at(20)
    line.at(40)
    line.rails = 0
    line.plan.failed(line.now)
    tries = []
    for _ in range(20_000):
        if line.at(400):
            line.rails = 0
            line.plan.failed(line.now)
            tries.append(line.now)
    assert [round(after - before) for before, after in pairwise(tries)][:4] == [60, 120, 240, 480]


@given(
    st.lists(st.tuples(st.floats(0.001, 100), st.integers(0, 1 << 32), st.integers(0, 1 << 24)), max_size=50),
    st.floats(0.001, 2),
)
def test_there_are_never_more_than_allowed(looks: list[tuple[float, int, int]], rtt_s: float) -> None:
    plan, now, total, rails = RailPlan(0.0), 0.0, 0, 0
    for passed_s, count, waiting in looks:
        now, total = now + passed_s, total + count
        rails, why = plan.look(now, rtt_s, (0, total), rails, waiting)
        assert 0 <= rails <= RAILS_PER_LINK
        assert why


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
