"""Suspicion: pauses double with each failure in a row and end with a success; probes are few; the table is bounded."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.wire.rate.suspicion import Suspicion

FIRST_S, LONGEST_S, REMEMBERED, AT_ONCE = 5.0, 60.0, 4, 2
EVENTS = ("failed", "failed anew", "count", "put aside", "forgive", "prolong", "due")


@pytest.mark.parametrize(
    ("steady", "pauses_s"), [(1, [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]), (3, [5.0, 5.0, 5.0, 10.0, 20.0, 40.0])]
)
def test_each_failure_doubles_the_pause_up_to_the_longest(steady: int, pauses_s: list[float]) -> None:
    peers, now = Suspicion[str](FIRST_S, LONGEST_S, REMEMBERED, steady=steady), 0.0
    for failures, pause_s in enumerate(pauses_s, 1):
        assert peers.failed(now, "a") == failures
        assert peers.failed(now + pause_s - 0.1, "a") == failures, "attempts that fail together are one failure"
        assert peers.is_aside(now + pause_s - 0.1, "a")
        now += pause_s
        assert not peers.is_aside(now, "a")
        assert peers.ripe(now) == ["a"]
    assert peers.forgive("a")
    assert peers.failed(now, "a") == 1


def test_an_attempt_made_in_spite_of_the_pause_counts() -> None:
    peers = Suspicion[str](FIRST_S, LONGEST_S, REMEMBERED)
    assert [peers.failed(now, "a", anew=True) for now in (0.0, 1.0)] == [1, 2]
    assert (peers.is_aside(10.9, "a"), peers.is_aside(11.0, "a")) == (True, False)


def test_probes_become_rare_and_never_stop() -> None:
    peers, now, times = Suspicion[str](FIRST_S, LONGEST_S, REMEMBERED), 0.0, list[float]()
    peers.failed(now, "a")
    for _ in range(20):
        now = peers.wakes_at()
        times.append(now)
        assert peers.due(now, AT_ONCE) == ["a"]
        assert (peers.due(now, AT_ONCE), peers.wakes_at()) == ([], math.inf)
        peers.failed(now, "a")
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert (pauses[0], pauses[-1]) == (2 * FIRST_S, LONGEST_S)


@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 7), st.sampled_from([0.0, 0.1, 3.0, 70.0])), max_size=80)
)
def test_whatever_happens_it_does_what_a_plain_list_of_suspects_does(events: list[tuple[str, int, float]]) -> None:
    peers, now = Suspicion[int](FIRST_S, LONGEST_S, REMEMBERED), 0.0
    plain: dict[int, tuple[int, float]] = {}  # failures and end of the pause; the newest event last
    probed = set[int]()
    for event, peer, passed_s in events:
        now += passed_s
        failures, until = plain.get(peer, (0, -math.inf))
        match event:
            case "failed" | "failed anew":
                anew = event == "failed anew"
                if anew or now >= until:
                    failures, until = failures + 1, now + min(FIRST_S * 2**failures, LONGEST_S)
                assert peers.failed(now, peer, anew=anew) == failures
                probed.discard(peer)
            case "count":
                peers.count(now, peer)
                failures += 1
            case "put aside":
                peers.put_aside(peer, now + passed_s)
                until = max(until, now + passed_s)
            case "prolong":
                peers.prolong(now, 1.0)
                plain = {one: (times, at + (at > now)) for one, (times, at) in plain.items()}
            case "forgive":
                assert peers.forgive(peer) == (plain.pop(peer, None) is not None)
                probed.discard(peer)
            case "due":
                for one in peers.due(now, AT_ONCE):
                    assert plain[one][1] <= now
                    assert one not in probed
                    probed.add(one)
        if event in ("failed", "failed anew", "count", "put aside"):
            plain.pop(peer, None)
            plain[peer] = failures, until
            for oldest in list(plain)[:-REMEMBERED]:
                del plain[oldest]
                probed.discard(oldest)
        assert len(peers) == len(plain) <= REMEMBERED
        assert peers.aside(now) == [one for one, (_, at) in plain.items() if now < at]
        assert peers.ripe(now) == [one for one, (_, at) in plain.items() if now >= at]
        assert peers.probed() == probed
        assert len(probed) <= AT_ONCE
        assert peers.wakes_at() == min((at for one, (_, at) in plain.items() if one not in probed), default=math.inf)


def test_who_is_not_kept_is_forgotten() -> None:
    peers = Suspicion[str](FIRST_S, LONGEST_S, REMEMBERED)
    for name in "abc":
        peers.failed(0.0, name)
    peers.keep_only({"b", "x"})
    assert ("b" in peers, len(peers), peers.get("a")) == (True, 1, None)
