"""Routing of microbatches: shares follow speed, failures rest, newcomers are probed but never flooded."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.pipeline.routes.wiring import StochasticWiring


def serve(wiring: StochasticWiring, seconds: dict[str, float], tasks: int) -> Counter[str]:
    """One task after another: who served how many."""
    now, count = 0.0, Counter[str]()
    busy = dict.fromkeys(seconds, 0.0)
    for _ in range(tasks):
        name = wiring.pick(now, 1.0)
        assert name is not None
        started = max(now, busy[name])
        busy[name] = started + seconds[name]
        wiring.answered(name, 1.0, started, busy[name])
        count[name] += 1
    return count


def test_two_to_one_speeds_get_two_thirds_and_one_third() -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["fast", "slow"])
    count = serve(wiring, {"fast": 1.0, "slow": 2.0}, 3000)
    assert abs(count["fast"] - 2000) <= 20


def test_a_newcomer_gets_a_task_soon_and_is_not_flooded() -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["a", "b"])
    serve(wiring, {"a": 0.1, "b": 0.1}, 50)
    wiring.update(["a", "b", "new"])
    picks = [wiring.pick(100.0, 1.0) for _ in range(6)]
    assert "new" in picks[:3]
    assert picks.count("new") == 1


def test_before_any_answer_shares_follow_published_rates() -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["fast", "slow"], {"fast": 30.0, "slow": 15.0})
    count = Counter(wiring.pick(0.0, 1.0) for _ in range(300))
    assert abs(count["fast"] - 200) <= 2


def test_a_newcomer_with_a_published_rate_gets_its_share_at_once_and_what_is_measured_counts_more() -> None:
    wiring = StochasticWiring(random.Random(1))
    rates = {"a": 10.0, "b": 10.0, "new": 5.0, "unknown": 0.0}
    wiring.update(["a", "b"], rates)
    serve(wiring, {"a": 0.1, "b": 0.1}, 50)
    wiring.update(["a", "b", "new"], rates)
    picks = Counter(wiring.pick(100.0, 1.0) for _ in range(50))
    assert abs(picks["new"] - 10) <= 1
    count = serve(wiring, {"a": 0.1, "b": 0.1, "new": 0.1}, 600)
    assert abs(count["new"] - 200) <= 25, "it is as fast as the others, whatever was published of it"
    wiring.update(rates, rates)
    assert [wiring.pick(200.0, 1.0) for _ in range(6)].count("unknown") == 1


def test_a_failed_peer_rests_longer_each_time_and_returns() -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["a"])
    wiring.failed("a", 0.0)
    assert wiring.pick(0.4, 1.0) is None
    assert wiring.pick(0.6, 1.0) == "a"
    wiring.failed("a", 1.0)
    assert wiring.pick(1.9, 1.0) is None
    assert wiring.wakes_at(1.9) == 2.0
    assert wiring.pick(2.1, 1.0) == "a"


def test_an_avoided_peer_is_used_only_when_nobody_else_is_left() -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["a", "b"])
    assert {wiring.pick(0.0, 1.0, avoid={"a"}) for _ in range(5)} == {"b"}
    wiring.failed("b", 0.0)
    assert wiring.pick(0.0, 1.0, avoid={"a"}) == "a"


def test_nobody_is_picked_from_an_empty_stage() -> None:
    wiring = StochasticWiring(random.Random(1))
    assert wiring.pick(0.0, 1.0) is None
    assert wiring.wakes_at(0.0) is None


@given(st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.5, 1.0, 2.0]), min_size=1))
def test_shares_follow_speed(seconds: dict[str, float]) -> None:
    wiring = StochasticWiring(random.Random(3))
    wiring.update(seconds)
    count = serve(wiring, seconds, 1200)
    whole = sum(1 / s for s in seconds.values())
    for name, each in seconds.items():
        assert abs(count[name] - 1200 / each / whole) <= 60


def test_who_cannot_be_reached_is_not_picked_even_if_nobody_else_is_left() -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["a", "b"])
    assert {wiring.pick(0.0, 1.0, never={"a"}) for _ in range(5)} == {"b"}
    assert wiring.pick(0.0, 1.0, avoid={"b"}, never={"a"}) == "b"
    assert wiring.pick(0.0, 1.0, never={"a", "b"}) is None
    assert wiring.pick(0.0, 1.0) in ("a", "b")


def test_a_peer_whose_failure_took_long_rests_for_longer() -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["a", "b"])
    wiring.failed("a", 20.0, took_s=17.0)
    assert {wiring.pick(now, 1.0) for now in (21.0, 40.0, 60.0, 87.0)} == {"b"}
    assert wiring.wakes_at(20.0) == 20.0
    wiring.failed("b", 88.0, took_s=0.01)
    assert wiring.pick(88.1, 1.0) == "a"


def test_a_peer_that_answered_others_while_one_call_failed_is_slow_and_not_lost() -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["a", "b"])
    wiring.answered("a", 1.0, started=0.0, now=140.0)
    wiring.failed("a", 150.0, took_s=150.0)
    assert wiring.rests("a", 150.4)
    assert not wiring.rests("a", 150.6)
    wiring.failed("b", 150.0, took_s=150.0)
    assert wiring.rests("b", 440.0)


def test_peers_that_seem_lost_are_tried_again_soon_when_nobody_else_is_left() -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["a", "b"])
    wiring.failed("a", 60.0, took_s=60.0)
    assert {wiring.pick(61.0 + second, 1.0) for second in range(100)} == {"b"}
    wiring.failed("b", 160.0, took_s=60.0)
    assert wiring.pick(160.1, 1.0) == "a"  # its own rest is over
    wiring.failed("a", 160.2, took_s=0.1)
    assert wiring.pick(160.3, 1.0) is None
    assert wiring.wakes_at(160.3) == 160.5
    assert wiring.pick(160.5, 1.0) == "b"


@pytest.mark.parametrize("ends", ["answer", "failure", "full", "nothing"])
def test_one_call_shows_whether_a_held_peer_is_back_and_then_it_is_held_no_more(ends: str) -> None:
    wiring = StochasticWiring(random.Random(1))
    wiring.update(["a"])
    wiring.hold("a", 10.0, until=40.0)
    assert wiring.pick(11.0, 1.0) is None
    assert wiring.rests("a", 11.0)
    assert wiring.wakes_at(11.0) == 40.0
    wiring.failed("a", 11.5, took_s=5.0)  # an older call: says nothing about the one that is to show it
    assert wiring.wakes_at(12.0) == 40.0
    assert not wiring.is_full("a", 12.0)
    if ends == "answer":
        assert wiring.let_go("a")
        assert not wiring.let_go("a")
    elif ends == "failure":
        wiring.failed("a", 12.5, took_s=1.0)
    elif ends == "full":
        wiring.rest("a", 12.6)
        assert wiring.is_full("a", 12.55)
    later = {"answer": 12.5, "failure": 13.5, "full": 12.6, "nothing": 40.0}[ends]
    assert wiring.pick(later - 0.1, 1.0) is (None if ends != "answer" else "a")
    assert wiring.pick(later, 1.0) == "a"
