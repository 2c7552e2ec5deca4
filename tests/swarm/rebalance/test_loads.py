"""Meter of a post's load: rate, busy share and queue of the last minute, or longer where little was finished."""

from __future__ import annotations

import pytest

from peerd.swarm.rebalance.loads import PERIOD_S, LoadMeter


def test_nothing_is_known_at_first() -> None:
    meter = LoadMeter(5.0)
    found = meter.look(5.0)
    assert (found.rate, found.busy, found.queue) == (0.0, 0.0, 0.0)
    assert meter.look(65.0).rate == 0.0


def test_the_rate_is_that_of_a_device_that_is_never_idle() -> None:
    meter = LoadMeter(0.0)
    for second in range(0, 100, 10):  # half a second of work for a microbatch every ten seconds
        meter.look(float(second))
        meter.worked(1.0, 0.5)
    found = meter.look(100.0)
    assert found.rate == pytest.approx(2.0)
    assert found.busy == pytest.approx(0.05)


def test_what_is_longer_ago_than_a_period_does_not_count() -> None:
    meter = LoadMeter(0.0)
    for second in range(200):
        meter.look(float(second))
        meter.worked(1.0, 0.9 if second < 100 else 0.1)
    assert meter.look(200.0).rate == pytest.approx(10.0)
    assert meter.look(200.0).busy == pytest.approx(0.1)


def test_a_slow_device_is_looked_at_for_longer() -> None:
    meter = LoadMeter(0.0)
    for at in range(0, 400, 5):
        meter.look(float(at))
        if at % 50 == 0:
            meter.worked(1.0, 50.0)
    assert meter.look(400.0).rate == pytest.approx(1 / 50)
    assert 400.0 > 4 * 50.0 > PERIOD_S


def test_the_queue_is_the_mean_of_those_that_waited() -> None:
    meter = LoadMeter(0.0)
    for _ in range(3):
        meter.came(0.0)
    meter.worked(1.0, 10.0)
    meter.went(10.0)
    assert meter.present == 2
    assert meter.look(20.0).queue == pytest.approx((3 * 10 + 2 * 10) / 20 - 0.5)
