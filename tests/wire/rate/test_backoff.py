"""Pauses after failures: doubled, bounded, and defined for any number of failures."""

from __future__ import annotations

import pytest

from peerd.wire.rate.backoff import backoff_s


def test_each_further_failure_doubles_the_pause_up_to_the_longest() -> None:
    assert [backoff_s(failures, 5.0, 60.0) for failures in range(1, 7)] == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


@pytest.mark.parametrize("failures", [1_000, 1_100, 10**9])
def test_failures_without_end_are_no_overflow(failures: int) -> None:
    assert backoff_s(failures, 5.0, 600.0) == 600.0
