"""Rates of lines: the median of the newest large payloads, for a bounded number of peers."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.ids import PeerId
from peerd.core.limits import LINE_RATE_PEERS
from peerd.wire.rate.arrival_rate import SAMPLE_BYTES, SAMPLES, LineRates


def peer(number: int) -> PeerId:
    return PeerId.from_public_key(number.to_bytes(4, "big") * 8)


samples = st.tuples(st.integers(0, 1 << 28), st.floats(0.0, 1e4, allow_nan=False))


@given(st.lists(st.tuples(st.integers(0, 3), samples), max_size=60))
def test_the_rate_is_the_median_of_the_newest_samples_that_count(arrivals: list[tuple[int, tuple[int, float]]]) -> None:
    rates = LineRates()
    expected: dict[PeerId, list[float]] = {}
    for number, (size, seconds) in arrivals:
        rates.arrived(peer(number), size, seconds)
        if size >= SAMPLE_BYTES and seconds > 0:
            expected.setdefault(peer(number), []).append(size / seconds)
    medians = {who: statistics.median(found[-SAMPLES:]) for who, found in expected.items()}
    assert rates.known() == medians
    for number in range(4):
        assert rates.rate(peer(number)) == medians.get(peer(number))


@given(st.lists(st.floats(1e3, 1e9), min_size=SAMPLES, max_size=SAMPLES), st.integers(0, SAMPLES // 2))
def test_fewer_than_half_the_samples_cannot_move_the_rate_beyond_the_others(honest: list[float], odd: int) -> None:
    rates = LineRates()
    for number, rate in enumerate(honest):
        rates.arrived(peer(1), SAMPLE_BYTES, SAMPLE_BYTES / (1e15 if number < odd else rate))
    found, others = rates.rate(peer(1)), honest[odd:]
    assert found is not None
    assert min(others) * 0.999 <= found <= max(others) * 1.001


@pytest.mark.parametrize(
    ("size", "seconds"), [(SAMPLE_BYTES - 1, 1.0), (SAMPLE_BYTES, 0.0), (-5, 1.0), (1 << 20, -1.0)]
)
def test_what_says_nothing_is_left_out(size: int, seconds: float) -> None:
    rates = LineRates()
    rates.arrived(peer(1), size, seconds)
    assert rates.rate(peer(1)) is None
    assert rates.known() == {}


def test_bytes_are_counted_for_each_peer() -> None:
    rates = LineRates()
    assert [rates.count(peer(1), 5), rates.count(peer(2), 7), rates.count(peer(1), 6)] == [5, 7, 11]
    assert rates.rate(peer(1)) is None


def test_the_peers_heard_from_last_are_kept() -> None:
    rates = LineRates()
    for number in range(LINE_RATE_PEERS):
        rates.arrived(peer(number), 1 << 20, 1.0)
    assert len(rates.known()) == LINE_RATE_PEERS
    rates.count(peer(0), 1)  # heard from again
    rates.arrived(peer(LINE_RATE_PEERS), 1 << 20, 1.0)
    assert rates.rate(peer(0)) == 1 << 20
    assert rates.rate(peer(1)) is None


def test_any_number_of_peers_is_bounded() -> None:
    rng, rates = random.Random(5), LineRates()
    peers = [peer(number) for number in range(2 * LINE_RATE_PEERS)]
    for _ in range(5 * LINE_RATE_PEERS):
        if rng.random() < 0.5:
            rates.count(rng.choice(peers), 1)
        else:
            rates.arrived(rng.choice(peers), 1 << 20, 2.0)
        assert len(rates._peers) <= LINE_RATE_PEERS
    assert len(rates._peers) == LINE_RATE_PEERS
