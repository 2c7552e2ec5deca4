"""A peer's rate of work: steady while it works, zero when it idles, soon right again after that."""

from __future__ import annotations

import pytest

from peerd.wire.rate.work_rate import WorkRate


def working(step_s: float, steps: int, samples: int = 32, averaging_s: float = 0.0) -> tuple[WorkRate, float]:
    """A peer that has made steps of eight microbatches each, with a pause for averaging."""
    rate, now = WorkRate(0.0), 0.0
    for _ in range(steps):
        for _ in range(8):
            now += (step_s - averaging_s) / 8
            rate.worked(now)
        now += averaging_s
        rate.stepped(now, samples)
    return rate, now


@pytest.mark.parametrize("step_s", [0.5, 4.0, 300.0])
def test_it_is_what_counts_over_time(step_s: float) -> None:
    rate, now = working(step_s, 20)
    assert rate.at(now) == pytest.approx(32 / step_s, rel=0.05)


def test_it_falls_to_zero_when_nothing_moves() -> None:
    rate, now = working(1.4, 30)
    assert rate.at(now + 1.0) > 20
    assert rate.at(now + 10.0) == 0.0
    assert rate.at(now + 18 * 60) == 0.0


def test_averaging_that_takes_long_is_no_standstill() -> None:
    rate, now = working(120.0, 10, averaging_s=100.0)
    assert rate.at(now + 90.0) > 0
    assert rate.at(now + 100.0 * 6) == 0.0


def test_after_a_standstill_patience_is_soon_as_short_as_before() -> None:
    rate, now = working(1.0, 20)
    now += 18 * 60
    rate.stepped(now, 32)
    for _ in range(10):
        now += 1.0
        rate.stepped(now, 32)
    assert rate.at(now) == pytest.approx(32, rel=0.35)
    assert rate.at(now + 12.0) == 0.0


def test_before_the_first_step_it_is_zero() -> None:
    rate = WorkRate(5.0)
    assert rate.at(5.0) == 0.0
    rate.worked(6.0)
    rate.stepped(7.0, 0)
    assert rate.at(7.0) == 0.0
