"""Durations of calls: when one is late, when it is given up, and how many are sent twice."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.core.limits import RPC_DEADLINE_S
from peerd.pipeline.routes.call_times import CallTimes

AT_FIRST_S = 30.0


def measured(seconds: float, name: str = "a", calls: int = 8) -> CallTimes:
    times = CallTimes()
    for _ in range(calls):
        times.took(name, seconds)
    return times


def test_nothing_is_late_while_nothing_is_known() -> None:
    times = measured(1.0, calls=3)
    assert times.late_after_s("a") is None
    assert times.given_up_after_s("a", AT_FIRST_S) == AT_FIRST_S


def test_a_peer_is_judged_by_its_own_calls_and_an_unknown_one_by_those_of_its_mates() -> None:
    times = measured(1.0)
    for _ in range(4):
        times.took("slow", 20.0)
    assert times.late_after_s("a") == 4.0
    assert times.late_after_s("slow") == 61.0
    assert times.late_after_s("new") == 61.0
    assert times.given_up_after_s("a", AT_FIRST_S) == 20.0
    assert times.given_up_after_s("slow", AT_FIRST_S) == 200.0


def test_what_was_waited_for_in_vain_is_given_longer_until_it_answers() -> None:
    times, waited = CallTimes(), []
    for _ in range(8):
        waited.append(times.given_up_after_s("slow", AT_FIRST_S))
        times.gave_up("slow", waited[-1])
    assert waited == [30, 60, 120, 240, 480, 960, 1920, 3600]
    times.took("slow", 100.0)
    assert times.given_up_after_s("slow", AT_FIRST_S) == AT_FIRST_S


def test_old_calls_and_peers_that_went_are_forgotten() -> None:
    times = measured(50.0)
    for _ in range(64):
        times.took("b", 1.0)
    assert times.late_after_s("a") == 151.0
    times.keep_only(["b"])
    assert times.late_after_s("a") == 4.0


def test_few_calls_are_sent_twice() -> None:
    times, sent = CallTimes(), 0
    for _ in range(1000):
        if times.can_hedge("a"):
            times.hedged("a")
            sent += 1
        times.took("a", 1.0)
    assert 1000 // 16 <= sent <= 1000 // 16 + 2


def test_every_late_call_to_one_that_was_overtaken_is_sent_twice_until_it_answers() -> None:
    times = CallTimes()
    times.hedged("a")
    assert not times.can_hedge("a")
    times.overtaken("a", 5.0)
    for _ in range(10):
        assert times.can_hedge("a")
        times.hedged("a")
    assert not times.can_hedge("b")
    times.took("a", 6.0)
    assert not times.can_hedge("a")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(1e-6, 1e4)), max_size=200))
def test_whatever_was_measured_a_call_is_late_before_it_is_given_up(calls: list[tuple[str, float]]) -> None:
    times = CallTimes()
    for name, seconds in calls:
        times.took(name, seconds)
    for name in "abcd":
        late_s, given_up_s = times.late_after_s(name), times.given_up_after_s(name, AT_FIRST_S)
        assert 20.0 <= given_up_s <= RPC_DEADLINE_S
        assert late_s is None or late_s < given_up_s or given_up_s == RPC_DEADLINE_S
