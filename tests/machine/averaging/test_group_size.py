"""Group size and failure rate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.machine.averaging.topology import FailureRate, group_size


def cost(peers: int, size: int, failure: float) -> float:
    rounds = next(d for d in range(1, 99) if size**d >= peers)
    return math.log(rounds) - size * math.log1p(-failure)


@pytest.mark.slow
@pytest.mark.parametrize("failure", [0.0, 0.01, 0.1, 0.5])
def test_up_to_ten_thousand_peers_get_the_cheapest_groups(failure: float) -> None:
    for peers in range(1, 10_001):
        found = group_size(peers, failure)
        if peers == 1:
            assert (found.size, found.rounds) == (1, 0)
            continue
        assert 2 <= found.size <= peers
        assert found.size**found.rounds >= peers > (found.size - 1) ** found.rounds
        assert found.size ** (found.rounds - 1) < peers
        if peers % 997 == 0:
            best = min(cost(peers, size, failure) for size in range(2, peers + 1))
            assert cost(peers, found.size, failure) == pytest.approx(best)


def test_known_sizes() -> None:
    def sizes(peers: int, *failures: float) -> list[tuple[int, int]]:
        return [(g.size, g.rounds) for g in (group_size(peers, failure) for failure in failures)]

    assert sizes(16, 0, 0.01, 0.1, 0.5) == [(16, 1), (16, 1), (4, 2), (2, 4)]
    assert sizes(256, 0, 0.01, 0.1, 0.3, 0.5) == [(256, 1), (16, 2), (4, 4), (2, 8), (2, 8)]
    assert sizes(2, 0, 0.999) == [(2, 1), (2, 1)]


@given(st.integers(1, 5000), st.floats(0, 0.999), st.integers(2, 40))
def test_a_bound_on_the_size_is_kept_and_the_choice_is_told(peers: int, failure: float, largest: int) -> None:
    found = group_size(peers, failure, largest)
    assert found.size <= largest
    assert found.why
    assert found == group_size(peers, failure, largest)


@pytest.mark.parametrize(("peers", "failure", "largest"), [(0, 0, 2), (4, 1.0, 4), (4, -0.1, 4), (4, 0.1, 1)])
def test_impossible_questions_are_refused(peers: int, failure: float, largest: int) -> None:
    with pytest.raises(ValueError, match="no groups"):
        group_size(peers, failure, largest)


def test_the_failure_rate_follows_what_is_seen_and_forgets() -> None:
    rate = FailureRate()
    assert rate.rate == 0.01
    for _ in range(100):
        rate.observe(16, 4)
    assert rate.rate == pytest.approx(0.25, abs=0.01)
    for _ in range(400):
        rate.observe(16, 0)
    assert rate.rate < 0.005
    for _ in range(2000):
        rate.observe(16, 16)
    assert rate.rate == 0.999
    with pytest.raises(ValueError, match="cannot be lost"):
        rate.observe(3, 4)
