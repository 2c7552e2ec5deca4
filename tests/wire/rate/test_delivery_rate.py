"""Delivery-rate estimate of a path from samples: outliers do not move it, growth is seen.
In-flight window of a striped stream: the path's bandwidth-delay product, found quickly, with little queueing.
"""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.wire.rate.delivery_rate import FLOOR_BYTES, BdpWindow, PathRate

STEP_S = 0.002


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


class Path:
    """A path of that rate and round trip; the sender always has as much under way as it may, or keeps it for a while.

    `pinged`: the receiver learns what waited half a round trip ago.
    """

    def __init__(
        self, bytes_per_s: float, rtt_s: float, jitter: float = 0.0, *, pinged: bool = False, kept_s: float = 0.0
    ) -> None:
        self.bytes_per_s, self.rtt_s, self.jitter = bytes_per_s, rtt_s, jitter
        self.pinged, self.kept_s = pinged, kept_s
        self.queues_s: deque[float] = deque([0.0], maxlen=max(1, round(rtt_s / 2 / STEP_S)))
        self.flight, self.now, self.queue_s = BdpWindow(0.0), 0.0, 0.0
        self.rng = random.Random(1)
        self.arrived_bytes = 0.0

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.queue_s = max(0.0, self.flight.limit_bytes / self.bytes_per_s - self.rtt_s - self.kept_s)
            self.queues_s.append(self.queue_s)
            rate = min(self.bytes_per_s, self.flight.limit_bytes / (self.rtt_s + self.kept_s))
            rate *= 1 + self.jitter * (self.rng.random() - 0.5)
            self.arrived_bytes += rate * STEP_S
            self.now += STEP_S
            seen_s = self.queues_s[0] if self.pinged else None
            self.flight.arrived(int(rate * STEP_S), self.now, self.rtt_s, seen_s)


@pytest.mark.parametrize("pinged", [False, True])
@pytest.mark.parametrize("rtt_s", [0.05, 0.1, 0.3])
def test_a_path_is_full_within_three_seconds_and_stays_so_with_a_short_queue(rtt_s: float, pinged: bool) -> None:
    path = Path(62.5e6, rtt_s, pinged=pinged)
    path.run(3.0)
    begin = path.arrived_bytes
    for _ in range(100):
        path.run(0.1)
        assert path.queue_s <= max(0.25 * rtt_s, 0.03) + 1e-6
    assert path.arrived_bytes - begin >= 0.99 * 10 * path.bytes_per_s


@pytest.mark.parametrize("pinged", [False, True])
def test_a_slow_path_is_not_flooded_once_its_rate_is_known(pinged: bool) -> None:
    path = Path(1.25e7, 0.1, pinged=pinged)
    path.run(2.0)
    assert path.flight.limit_bytes <= 1.3 * 1.25e6


@pytest.mark.parametrize("pinged", [False, True])
@pytest.mark.parametrize("rtt_s", [0.1, 0.3])
def test_the_start_puts_no_more_in_a_queue_than_a_router_at_home_has(rtt_s: float, pinged: bool) -> None:
    path = Path(62.5e6, rtt_s, pinged=pinged)
    longest_s = 0.0
    for _ in range(500):
        path.run(0.01)
        longest_s = max(longest_s, path.queue_s)
    assert longest_s <= 0.08


@pytest.mark.parametrize("pinged", [False, True])
def test_noise_is_not_taken_for_more_room(pinged: bool) -> None:
    path = Path(62.5e6, 0.1, jitter=0.3, pinged=pinged)
    path.run(3.0)
    for _ in range(100):
        path.run(0.1)
        assert path.queue_s <= 0.05


@pytest.mark.parametrize("kept_s", [0.03, 0.1])
def test_what_waits_at_the_sender_does_not_keep_a_path_half_empty(kept_s: float) -> None:
    path = Path(62.5e6, 0.3, pinged=True, kept_s=kept_s)
    path.run(5.0)
    begin = path.arrived_bytes
    path.run(10.0)
    assert path.arrived_bytes - begin >= 0.95 * 10 * path.bytes_per_s


def test_a_queue_that_is_seen_shrinks_soon() -> None:
    path = Path(62.5e6, 0.3, pinged=True)
    path.run(5.0)
    path.bytes_per_s = 3e7
    path.run(3.0)
    assert path.queue_s <= 0.05


@pytest.mark.parametrize("pinged", [False, True])
def test_a_path_that_becomes_faster_is_found_to_be(pinged: bool) -> None:
    path = Path(2e7, 0.3, pinged=pinged)
    path.run(5.0)
    path.bytes_per_s = 6e7
    path.run(8.0)
    assert path.flight.limit_bytes >= 6e7 * 0.3


@pytest.mark.parametrize("pinged", [False, True])
def test_a_path_that_becomes_slower_is_believed_after_a_while(pinged: bool) -> None:
    path = Path(6e7, 0.1, pinged=pinged)
    path.run(3.0)
    path.bytes_per_s = 2e7
    path.run(1.5)
    assert path.flight.limit_bytes <= 1.3 * 2e6


def test_a_pause_says_nothing_of_the_path() -> None:
    path = Path(62.5e6, 0.1)
    path.run(3.0)
    before = path.flight.limit_bytes
    for _ in range(20):
        path.now += 5.0
        path.flight.arrived(1000, path.now, 0.1)
    assert path.flight.limit_bytes == before


@given(
    st.lists(st.tuples(st.integers(0, 1 << 24), st.floats(0, 10), st.none() | st.floats(0, 10)), max_size=60),
    st.floats(1e-6, 5),
)
def test_the_floor_always_holds(arrivals: list[tuple[int, float, float | None]], rtt_s: float) -> None:
    flight, now = BdpWindow(0.0), 0.0
    for size, passed_s, queue_s in arrivals:
        now += passed_s
        flight.arrived(size, now, rtt_s, queue_s)
        assert flight.limit_bytes >= FLOOR_BYTES
