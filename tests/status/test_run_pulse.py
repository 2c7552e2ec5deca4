"""What a daemon remembers of its run: standing still, who is gone, losses and shares."""

from __future__ import annotations

import itertools
import math

from peerd.status.run_pulse import (
    MISSED_S,
    PEERS,
    POINTS,
    STILL_S,
    ContributionShares,
    ListedPosts,
    LossHistory,
    StandstillDetector,
)


def test_a_run_stands_still_when_nothing_changes_for_a_while_and_there_is_a_reason() -> None:
    pulse = StandstillDetector()
    assert pulse.standstill(5.0) is None
    pulse.note(10.0, (7, 16), "")
    pulse.note(50.0, (7, 16), "stage 1 has no peers")
    still = pulse.standstill(50.0)
    assert still is not None
    assert (still.why, still.for_s) == ("stage 1 has no peers", 40.0)
    pulse.note(51.0, (7, 20), "stage 1 has no peers")
    assert pulse.standstill(51.0 + STILL_S - 0.1) is None
    assert pulse.standstill(51.0 + STILL_S) is not None
    pulse.note(60.0, (7, 20), "")
    assert pulse.standstill(999.0) is None


def test_a_post_that_is_listed_no_more_is_gone_after_a_moment_and_back_when_it_is() -> None:
    presence = ListedPosts()
    presence.note(0.0, [("a", 0), ("b", 1)])
    assert presence.follows()
    presence.note(10.0, [("a", 0)])
    assert not presence.is_gone(10.0, ("b", 1))
    presence.note(11.0, [("a", 0)])
    assert presence.is_gone(10.0 + MISSED_S, ("b", 1))
    assert not presence.is_gone(99.0, ("a", 0))
    assert not presence.is_gone(99.0, ("a", 1))
    presence.note(20.0, [("a", 0), ("b", 1)])
    assert not presence.is_gone(99.0, ("b", 1))


def test_a_new_conductors_list_that_fills_up_marks_nobody() -> None:
    presence = ListedPosts()
    presence.note(0.0, [("a", 0), ("b", 1)])
    presence.note(1.0, [("a", 0)])
    presence.note(1.5, [("a", 0), ("b", 1)])
    assert not presence.is_gone(60.0, ("b", 1))


def test_losses_are_thinned_out_evenly_and_the_newest_stays() -> None:
    history = LossHistory()
    for step in range(20_000):
        history.note(step, 5.0 - step / 10_000)
    told = history.points()
    assert POINTS / 2 <= len(told) <= POINTS + 1
    assert told[0][0] == 0
    assert told[-1] == (19_999, 5.0 - 1.9999)
    gaps = {round(b[0] - a[0]) for a, b in itertools.pairwise(told[:-1])}
    assert len(gaps) == 1


def test_what_is_no_loss_leaves_no_point() -> None:
    history = LossHistory()
    for step, loss in ((1, math.nan), (None, 2.0), (-1, 2.0), (True, 2.0), (3, "nan"), (4, 2.0), (2, 1.0)):
        history.note(step, loss)
    assert history.points() == [(4, 2.0)]


def test_a_share_is_of_what_was_given_since_the_first_look_and_before_that_of_all() -> None:
    shares = ContributionShares()
    assert shares.of("me") is None
    shares.note({"old": 9000.0, "me": 1000.0})
    assert shares.of("me") == 0.1
    shares.note({"old": 9300.0, "me": 1100.0})
    assert shares.of("me") == 0.25
    shares.note({"old": 9300.0, "me": 1100.0, "newcomer": 400.0})
    assert shares.of("newcomer") == 0.5
    assert shares.of("nobody") == 0.0
    shares.note({f"crowd{n}": 1.0 for n in range(2 * PEERS)})
    assert len(shares._latest) <= PEERS
