"""Statistics of rounds: outcomes are counted by the peer that was waited for or lost."""

from __future__ import annotations

import pytest

from peerd.averaging.allreduce_round import AllReduceRound, RoundFailed, cut
from peerd.averaging.stats import RoundStats, explained

GROUP = ("a", "b", "c")


def begun(now: float = 0.0) -> AllReduceRound:
    """As `b` sees it, who sums part 1 of the three."""
    round_ = AllReduceRound("b", GROUP, cut(9, GROUP, 3), 5.0)
    round_.begin(now)
    return round_


def test_who_comes_last_made_us_wait_from_the_last_but_one() -> None:
    outcomes, round_ = RoundStats(), begun(10.0)
    round_.arrived(10.0, 1, "b")
    round_.arrived(10.2, 1, "a")
    round_.arrived(11.7, 1, "c")
    round_.returned(11.8, 0)
    round_.returned(12.0, 2)
    outcomes.ended(12.0, round_)
    assert outcomes.told() == {
        "rounds": 1,
        "failed": 0,
        "last_s": 2.0,
        "waited_s": {"c": 1.5},
        "last_failure": None,
    }


def test_one_who_is_late_with_many_parts_at_once_is_waited_for_once() -> None:
    round_ = AllReduceRound("b", GROUP, cut(90, GROUP, 3), 5.0)  # 30 parts, ten of them ours
    round_.begin(0.0)
    ours = [part.index for part in round_.parts if part.owner == "b"]
    assert len(ours) == 10
    for at, sender in ((0.1, "a"), (0.2, "b"), (3.0, "c")):
        for number, index in enumerate(ours):
            round_.arrived(at + number / 100, index, sender)
    assert round_.waited_s == {"c": pytest.approx(3.09 - 0.2)}


def test_nobody_is_waited_for_when_our_own_version_is_the_last() -> None:
    round_ = begun()
    round_.arrived(0.1, 1, "a")
    round_.arrived(0.2, 1, "c")
    round_.arrived(3.0, 1, "b")
    assert round_.waited_s == {}


def test_a_broken_round_tells_why_by_whom_and_how_much_is_lost() -> None:
    outcomes, round_ = RoundStats(), begun()
    round_.arrived(0.0, 1, "a")
    round_.returned(1.0, 0)
    failure = RoundFailed("a member of the group fell silent", ("12D3KooWabcdefgh12345678",))
    outcomes.broke(6.0, round_, failure)
    assert failure.lost_share == pytest.approx(2 / 3)
    assert explained(failure) == "a member of the group fell silent by …12345678; 67% of the vector has no sum"
    assert outcomes.told()["last_failure"] == explained(failure)
    assert (outcomes.rounds, outcomes.failed) == (0, 1)


def test_a_helper_misses_what_it_was_to_sum_and_a_whole_round_misses_nothing() -> None:
    helper = AllReduceRound("h", GROUP, cut(8, (*GROUP, "h"), 2), 5.0)
    assert helper.missing_share() == 1.0
    for sender in GROUP:
        helper.arrived(0.0, 3, sender)
    assert helper.missing_share() == 0.0


def test_only_those_who_were_waited_for_longest_are_remembered() -> None:
    outcomes = RoundStats()
    for i in range(200):
        round_ = AllReduceRound("b", ("b", f"p{i}"), cut(2, ("b", f"p{i}"), 1), 5.0)
        round_.arrived(0.0, 0, "b")
        round_.arrived(float(i), 0, f"p{i}")
        outcomes.ended(float(i), round_)
    assert len(outcomes.waited_s) == 64
    assert list(outcomes.told()["waited_s"]) == ["p199", "p198", "p197", "p196", "p195"]
