"""Costs of hops: answers become seconds of computing and between peers, and claims fit into measured time."""

from __future__ import annotations

import random

import pytest

from peerd.messages.handover import Hop
from peerd.pipeline.routes.hop_costs import TRAINER, HopCosts, within
from tests.worlds.machines.routesim import RECEIPT


def costs() -> HopCosts:
    return HopCosts(random.Random(1))


def test_an_answer_is_taken_apart() -> None:
    """1 s on the way to a and back, 2 s there, 4 s between a and b, 3 s at b."""
    one = costs()
    one.answered(0.0, [Hop("a", RECEIPT, 2.0, 0.0, 7.0), Hop("b", RECEIPT, 3.0, 0.0, 0.0)], 10.0, [0, 0])
    assert one.services(["a"], 0.0, {}) == [2.0]
    assert one.services(["b"], 0.0, {}) == [3.0]
    assert one.between(TRAINER, ["a"], 1.0) == [1.0]
    assert one.between("a", ["b"], 1.0) == [4.0]


def test_time_between_two_counts_as_it_would_be_without_others_of_ours_on_the_same_line() -> None:
    one, b = costs(), Hop("b", RECEIPT, 3.0)
    one.answered(0.0, [Hop("a", RECEIPT, 2.0, 0.0, 9.0), b], 12.0, [0, 0], None, [1.0, 3.0])
    assert one.between("a", ["b"], 1.0) == [2.0]
    one.answered(0.0, [Hop("a", RECEIPT, 2.0, 0.0, 15.0), b], 18.0, [0, 0], None, [1.0, 6.0])
    assert one.between(TRAINER, ["a"], 1.0) == [1.0], "it is known how long b takes then, and no fault of a's"


def test_the_time_lost_with_a_peer_that_did_not_do_it_counts_for_the_way_to_it_and_not_for_who_did() -> None:
    one = costs()
    for _ in range(3):
        one.answered(0.0, [Hop("a", RECEIPT, 2.0, 0.0, 7.0), Hop("b", RECEIPT, 3.0)], 10.0, [0, 0])
        one.answered(0.0, [Hop("a", RECEIPT, 2.0, 0.0, 157.0), Hop("b", RECEIPT, 3.0)], 160.0, [0, 0], ["a", "c"])
    assert one.between("a", ["b"], 1.0) == [4.0]
    assert one.between("a", ["c"], 1.0) == [154.0]


def test_a_peer_that_is_not_known_is_taken_for_a_usual_one_nearby() -> None:
    one = costs()
    assert one.services(["a", "b"], 0.0, {}) == [0.0, 0.0]
    for before in ("first", "second"):
        for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
            one.answered(0.0, [Hop(before, RECEIPT, 1.0, 0.0, 9.0), Hop(name, RECEIPT, seconds)], 11.0, [0, 0])
    assert one.services(["a", "b", "c", "new"], 0.0, {}) == [1.0, 2.0, 4.0, 2.0]
    assert one.between("first", ["a", "b", "c", "new"], 0.0) == [8.0, 7.0, 5.0, 5.0]


def test_a_peer_that_is_not_known_is_expected_to_be_as_fast_as_its_published_rate_makes_it_beside_others() -> None:
    one = costs()
    rates = {"a": 2.0, "b": 1.0, "c": 0.5, "new": 0.25, "liar": 1e9}
    for before in ("first", "second"):
        for name, seconds in (("a", 1.0), ("b", 2.0), ("c", 4.0)):
            one.answered(0.0, [Hop(before, RECEIPT, 1.0, 0.0, 9.0), Hop(name, RECEIPT, seconds)], 11.0, [0, 0])
    assert one.services(["a", "b", "c", "new", "liar", "silent"], 0.0, rates) == [1.0, 2.0, 4.0, 8.0, 1.0, 2.0]
    assert costs().services(["a", "b", "c", "silent"], 0.0, rates) == [0.5, 1.0, 2.0, 1.0]


def test_one_peer_alone_is_not_believed_that_another_is_slow() -> None:
    one = costs()
    for before, name, seconds in (("p", "a", 1.0), ("q", "a", 1.0), ("liar", "b", 9.0), ("liar", "b", 9.0)):
        one.answered(0.0, [Hop(before, RECEIPT, 0.0, 0.0, 9.0), Hop(name, RECEIPT, seconds)], 9.0, [0, 0])
    assert one.services(["a", "b"], 0.0, {}) == [1.0, 1.0]
    one.answered(0.0, [Hop("p", RECEIPT, 0.0, 0.0, 9.0), Hop("b", RECEIPT, 4.0)], 9.0, [0, 0])
    assert one.services(["a", "b"], 0.0, {}) == [1.0, 4.0]


def test_waiting_counts_where_our_own_microbatches_do_not_explain_it() -> None:
    one = costs()
    for _ in range(20):
        one.answered(0.0, [Hop("a", RECEIPT, 1.0, 3.0), Hop("b", RECEIPT, 1.0)], 10.0, [3, 0])
    assert one.waiting_s("a", 0.0) == 0.0
    for _ in range(20):
        one.answered(0.0, [Hop("a", RECEIPT, 1.0, 3.0), Hop("b", RECEIPT, 1.0)], 10.0, [1, 0])
    assert one.waiting_s("a", 0.0) == pytest.approx(2.0, rel=0.01)


def test_claims_are_cut_to_what_the_one_before_measured() -> None:
    found = within([Hop("a", RECEIPT, 2.0, 1.0, 50.0), Hop("b", RECEIPT, 6.0, 9.0, 9.0), Hop("c", RECEIPT, 1.0)], 10.0)
    assert [(hop.service_s, hop.wait_s, hop.onward_s) for hop in found] == [(2, 1, 7), (6, 1, 0), (0, 0, 0)]
    assert all(hop.whole_s <= 10.0 for hop in found)


def test_no_peer_is_taken_for_more_than_eight_times_as_fast_as_the_usual_one() -> None:
    one = costs()
    for name, seconds in (("a", 0.0), ("b", 8.0), ("c", 8.0)):
        one.answered(0.0, [Hop(name, RECEIPT, seconds)], 10.0, [0])
    assert one.services(["a", "b", "c"], 0.0, {}) == [1.0, 8.0, 8.0]


def test_computing_is_the_median_of_what_different_peers_brought() -> None:
    one = costs()
    for before, seconds in (("liar", 100.0), ("p", 1.0), ("q", 1.2), ("liar", 1e5), ("liar", 1e6)):
        one.answered(0.0, [Hop(before, RECEIPT, 1.0, 0.0, 1e7), Hop("a", RECEIPT, seconds)], 1e8, [0, 0])
    assert one.services(["a"], 0.0, {}) == [1.2]


def test_time_that_is_blamed_on_those_after_a_hop_counts_as_the_way_to_them() -> None:
    one = costs()
    honest = [Hop("a", RECEIPT, 1.0, 0.0, 5.0), Hop("b", RECEIPT, 4.0)]
    for _ in range(8):
        one.answered(0.0, honest, 7.0, [0, 0])
        one.answered(0.0, [Hop("p", RECEIPT, 1.0, 0.0, 5.0), honest[1]], 7.0, [0, 0])
    for _ in range(30):  # it takes 40 s more, and says that b computed all the time
        one.answered(0.0, [Hop("a", RECEIPT, 0.0, 0.0, 46.0), Hop("b", RECEIPT, 45.0)], 47.0, [0, 0])
    assert one.services(["b"], 0.0, {}) == [4.0]
    (far_s,) = one.between("a", ["b"], 0.0)
    assert far_s > 35.0
