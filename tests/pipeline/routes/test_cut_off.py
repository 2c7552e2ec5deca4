"""Peers that could not be reached: left out until a probe gets through, a few probed at once."""

from __future__ import annotations

import random

from peerd.pipeline.routes.cut_off import CutOff


def test_a_lost_peer_is_out_until_a_probe_gets_through() -> None:
    reach = CutOff()
    assert reach.lost("a", 0.0)
    assert not reach.lost("a", 0.1)
    assert "a" in reach
    assert reach.due(0.1) == []
    assert reach.due(0.6) == ["a"]
    assert reach.due(0.7) == []
    assert not reach.ended("a", False, 3.0)
    assert "a" in reach
    assert reach.due(3.1) == []
    assert reach.due(10.0) == ["a"]
    assert reach.ended("a", True, 10.1)
    assert "a" not in reach


def test_a_call_that_began_before_the_peer_was_found_again_says_nothing() -> None:
    reach = CutOff()
    assert not reach.is_stale("a", 0.0)
    reach.lost("a", 1.0)
    assert not reach.is_stale("a", 0.0)
    assert reach.due(2.0) == ["a"]
    reach.ended("a", True, 3.0)
    assert reach.is_stale("a", 2.9)
    assert not reach.is_stale("a", 3.0)
    reach.keep_only([])
    assert not reach.is_stale("a", 0.0)


def test_few_are_probed_at_once_and_all_have_their_turn() -> None:
    reach, rng, probed, under_way = CutOff(), random.Random(3), set[str](), []
    for number in range(100):
        reach.lost(f"peer{number}", 0.0)
    now = 1.0
    while len(probed) < 100:
        under_way += reach.due(now)
        assert 0 < len(under_way) <= 8
        name = under_way.pop(rng.randrange(len(under_way)))
        probed.add(name)
        reach.ended(name, False, now)
        now += 0.01


def test_who_serves_no_more_is_forgotten_and_its_probe_is_harmless() -> None:
    reach = CutOff()
    reach.lost("a", 0.0)
    assert reach.due(1.0) == ["a"]
    reach.keep_only(["b"])
    assert "a" not in reach
    assert not reach.ended("a", True, 2.0)
    assert reach.wakes_at() == float("inf")
