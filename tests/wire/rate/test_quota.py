"""Bounds per minute: none is exceeded, whatever the order, and the tables keep what happened lately and no more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.wire.rate.quota import LogLimit, Quota

ALL, EACH = 12, 3


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 20)), max_size=200))
def test_no_bound_is_exceeded_in_any_minute(steps: list[tuple[int, float]]) -> None:
    quota, now, done = Quota(ALL, EACH), 0.0, list[tuple[float, int]]()
    for name, pause_s in steps:
        now += pause_s
        names = "", name
        lately = [who for at, who in done if at > now - 60]
        full = 0 if len(lately) >= ALL else 1 if lately.count(name) >= EACH else None
        assert quota.exceeded(now, names) == full
        if full is None:
            quota.count(now, names)
            done.append((now, name))
        assert len(quota) <= 1 + ALL


def test_what_is_refused_is_not_remembered() -> None:
    quota = Quota(1, 1)
    quota.count(0.0, ("", "first"))
    assert [quota.exceeded(1.0, ("", name)) for name in range(1000)] == [0] * 1000
    assert len(quota) == 2


def test_a_subject_is_logged_once_in_its_time_and_few_are_remembered() -> None:
    limit = LogLimit[str](10.0, subjects=2)
    assert [limit.may_log(now, "a") for now in (0.0, 9.9, 10.0, 19.9)] == [True, False, True, False]
    assert limit.may_log(19.9, "b")
    assert limit.may_log(19.9, "c")
    assert [limit.may_log(19.9, subject) for subject in "cba"] == [False, False, True]
