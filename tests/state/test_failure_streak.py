"""A streak of failures: longer and longer pauses, and few log lines that account for every failure."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from peerd.state.failure_streak import REMIND_S, FailureStreak


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_success() -> None:
    streak = FailureStreak(0.5, 20.0)
    pauses = []
    for at in range(8):
        streak.failed(at, OSError, "no")
        pauses.append(streak.pause_s)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0]
    assert (streak.succeeded(), streak.pause_s, streak.reason) == (8, 0.0, None)


@given(st.lists(st.tuples(st.floats(0.0, 200.0), st.sampled_from("abc"), st.booleans()), max_size=200))
def test_lines_are_seldom_and_account_for_every_failure(failures: list[tuple[float, str, bool]]) -> None:
    streak, now = FailureStreak(0.5, 20.0), 0.0
    lines: dict[str, list[tuple[float, int]]] = {}
    seen: dict[str, int] = {}
    for after_s, cause, works in failures:
        now += after_s
        seen[cause] = seen.get(cause, 0) + 1
        if (count := streak.failed(now, cause, cause)) is not None:
            lines.setdefault(cause, []).append((now, count))
            assert sum(counted for _, counted in lines[cause]) == seen[cause]
        assert streak.reason == cause
        if works:
            streak.succeeded()
    for cause in seen:
        times = [at for at, _ in lines[cause]]
        assert all(later - earlier >= REMIND_S for earlier, later in pairwise(times))
        assert lines[cause][0][1] == 1, "the first failure is logged at once"
