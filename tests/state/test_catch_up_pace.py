"""The pace of a member that catches up: one that is too slow waits longer each time, and tries again after a change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.core.limits import STATE_TOTALS, STATE_TRAIL
from peerd.state.catch_up_pace import CatchUpPace, Sizes

SIZES = Sizes(state=30_000_000, total=10_000_000)
STEP_S = 10.0


def stepping(until_s: float, step_s: float = STEP_S) -> CatchUpPace:
    """A member that has seen the swarm step up to this time."""
    pace = CatchUpPace()
    for step in range(int(until_s / step_s) + 1):
        pace.swarm_at(step * step_s, step)
    return pace


def fetch(pace: CatchUpPace, now: float, rate: float, donors: tuple[str, ...] = ("a",)) -> None:
    pace.fetched(now, SIZES, int(20.0 * rate), 20.0, donors)


def test_a_line_that_carries_less_than_a_total_each_step_is_named_after_two_states() -> None:
    pace = stepping(100.0)
    fetch(pace, 100.0, 500_000.0)
    assert pace.too_slow(100.0, ["a"]) is None, "a single one may have met with a misfortune"
    fetch(pace, 100.0, 500_000.0)
    why = pace.too_slow(100.0, ["a"])
    assert why is not None
    for part in ("a state has 30 MB", "each step adds 10 MB", "from 1 peer at 500 kB/s", "It would at 1.01 MB/s"):
        assert part in why, why


def test_each_pause_is_twice_as_long_as_the_one_before_up_to_a_longest() -> None:
    pace, now, pauses = stepping(100.0), 100.0, []
    fetch(pace, now, 500_000.0)
    for _ in range(8):
        fetch(pace, now, 500_000.0)
        began = now
        while pace.too_slow(now, ["a"]) is not None:
            now += 1.0
            pace.swarm_at(now, int(now / STEP_S))
        pauses.append(now - began)
    assert pauses == [30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0, 900.0]


def test_another_donor_or_slower_steps_end_the_wait() -> None:
    pace = stepping(100.0)
    for _ in range(2):
        fetch(pace, 100.0, 500_000.0)
    assert pace.too_slow(101.0, ["a"]) is not None
    assert pace.too_slow(101.0, ["a", "b"]) is None
    assert pace.too_slow(101.0, []) is not None, "fewer donors are no help"
    slower = stepping(100.0, step_s=25.0)
    for _ in range(2):
        fetch(slower, 100.0, 500_000.0)
    assert slower.too_slow(101.0, ["a"]) is None


def test_a_member_that_arrived_begins_anew() -> None:
    pace = stepping(100.0)
    for _ in range(2):
        fetch(pace, 100.0, 500_000.0)
    pace.arrived()
    fetch(pace, 101.0, 500_000.0)
    assert pace.too_slow(101.0, ["a"]) is None


def test_a_short_download_says_nothing_of_the_line() -> None:
    pace = stepping(100.0)
    for _ in range(5):
        pace.fetched(100.0, SIZES, 100, 0.5, ["a"])
    assert pace.too_slow(100.0, ["a"]) is None


@given(st.floats(0.01, 1e3), st.integers(1, 1 << 40), st.integers(1, 1 << 40), st.floats(1.0, 1e10))
def test_no_line_that_arrives_by_the_arithmetic_is_called_too_slow(
    step_s: float, state: int, total: int, rate: float
) -> None:
    """While the state comes in, totals come beside it; they wait for it in bounded numbers."""
    pace, sizes = CatchUpPace(), Sizes(state, total)
    for step in range(10):
        pace.swarm_at(step * step_s, step)
    now = 9 * step_s
    for _ in range(3):
        pace.fetched(now, sizes, int(rate * 10), 10.0, ["a"])
    spare = int(rate * 10) / 10.0 - total / step_s
    arrives = spare > 0 and state / spare <= 0.99 * step_s * (STATE_TOTALS + STATE_TRAIL)
    if arrives:
        assert pace.too_slow(now, ["a"]) is None
