"""Rates that a conductor believes: what posts state, as far as the batches bear it out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.messages.swarm import PostLoad
from peerd.swarm.rebalance.estimated_rates import HEADROOM, EstimatedRates, by_chance

STEP_S = 10.0


def beliefs(
    done: dict[str, int], steps: int = 6, work: tuple[float, ...] = (1.0, 1.0), busy: float = 0.0, **claims: float
) -> EstimatedRates:
    """After so many steps in each of which posts did so much."""
    found = EstimatedRates(work)
    for post, rate in claims.items():
        found.told(0.0, post.replace("_", "/"), PostLoad(rate, busy))
    for step in range(steps + 1):
        found.step_made(step * STEP_S, done, sorted(done))
    return found


def test_an_idle_peer_is_believed_to_be_faster_than_what_it_did() -> None:
    assert beliefs({"a/0": 10}, a_0=2.0).measured("a/0") == pytest.approx(2.0)


def test_a_post_that_is_not_measured_has_no_rate_to_publish() -> None:
    said = beliefs({"a/0": 10}, a_0=2.0, new_0=9.0)
    assert said.borne_out(["a/0", "new/0"]) == {"a/0": pytest.approx(2.0)}


def test_a_boast_is_worth_a_few_times_what_was_done_at_most() -> None:
    said = beliefs({"a/0": 10, "b/0": 0}, a_0=1e6, b_0=1e6)
    assert said.measured("a/0") == pytest.approx(HEADROOM * by_chance(60) / 60)
    assert said.measured("b/0") == pytest.approx(HEADROOM * by_chance(0) / 60)


def test_a_peer_that_states_to_have_done_more_than_it_did_is_believed_only_that() -> None:
    assert beliefs({"a/0": 10}, a_0=3.0, busy=0.3).measured("a/0") == pytest.approx(3.0)
    assert beliefs({"a/0": 10}, a_0=3.0, busy=0.9).measured("a/0") == pytest.approx(1.0)


def test_a_peer_that_is_busy_only_at_the_end_of_each_step_has_not_stated_to_be_so_all_the_time() -> None:
    said = beliefs({"a/0": 10}, steps=0)
    for step in range(6):
        for at, busy in ((1.0, 0.0), (7.0, 1.0)):
            said.told(step * STEP_S + at, "a/0", PostLoad(3.0, busy))
        said.step_made((step + 1) * STEP_S, {"a/0": 10}, ["a/0"])
        assert said.measured("a/0") == pytest.approx(3.0)  # 3 a second for 3 to 4 s: 10 or so


def test_a_peer_can_do_what_it_did_whatever_it_says() -> None:
    assert beliefs({"a/0": 10}, a_0=0.01).measured("a/0") == pytest.approx(1.0)
    assert beliefs({"a/0": 10}).measured("a/0") == pytest.approx(1.0)  # it has said nothing


def test_a_newcomer_counts_as_a_usual_device_until_it_has_served_a_step() -> None:
    said = beliefs({"a/0": 10, "b/0": 20, "c/1": 60}, work=(2.0, 1.0))
    said.told(0.0, "new/1", PostLoad(1e9))
    assert said.measured("new/1") is None
    assert said.rates(["a/0", "b/0", "c/1", "new/1"])["new/1"] == pytest.approx(4.0)  # the median: b's, with less work
    said.step_made(70.0, {"new/1": 5}, ["new/1"])
    assert said.measured("new/1") is None  # it came in the midst of that step
    said.step_made(80.0, {"new/1": 5}, ["new/1"])
    assert said.measured("new/1") == pytest.approx(HEADROOM * by_chance(5) / 10)


def test_nothing_is_known_before_two_steps_and_after_a_fresh_start() -> None:
    said = EstimatedRates((1.0,))
    said.step_made(0.0, {"a/0": 3}, ["a/0"])
    assert said.measured("a/0") is None
    assert said.rates(["a/0"]) == {"a/0": 0.0}
    said = beliefs({"a/0": 10})
    said.restart()
    assert said.measured("a/0") is None


def test_posts_that_are_gone_are_forgotten() -> None:
    said = beliefs({"a/0": 10, "b/0": 10}, a_0=3.0)
    said.keep_only({"b/0": None})
    assert said.claim("a/0") == PostLoad()
    assert said.measured("a/0") is None
    assert said.measured("b/0") is not None


@given(st.lists(st.tuples(st.integers(0, 1000), st.floats(0, 1e9)), min_size=1, max_size=20), st.integers(1, 12))
def test_no_claim_leads_beyond_the_bounds(peers: list[tuple[int, float]], steps: int) -> None:
    said, done = EstimatedRates((1.0, 2.0)), {f"p{i}/{i % 2}": count for i, (count, _) in enumerate(peers)}
    for post, (_, claim) in zip(done, peers, strict=True):
        said.told(0.0, post, PostLoad(claim))
    for step in range(steps + 1):
        said.step_made(step * STEP_S, done, sorted(done))
    for post, rate in said.rates(sorted(done)).items():
        assert math.isfinite(rate)
        assert done[post] / STEP_S * (1 - 1e-9) <= rate <= HEADROOM * by_chance(done[post]) / STEP_S
