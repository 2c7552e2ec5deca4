"""All-reduce bookkeeping: parts cover the vector, sums fall due once, the late are named."""

from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.averaging.allreduce_round import AllReduceRound, AveragingPlan, PartPace, cut, parts_of_a_share
from peerd.core.errors import PeerdError
from peerd.messages.encoding import decode, encode
from peerd.messages.swarm import Mbs, Party, Prepare

GROUP = ("a", "b", "c")


@given(st.integers(0, 5000), st.integers(1, 9), st.integers(1, 700))
def test_parts_cover_the_vector_once(length: int, members: int, part_elements: int) -> None:
    group = tuple(f"p{i}" for i in range(members))
    parts = cut(length, group, part_elements)
    assert [p.index for p in parts] == list(range(len(parts)))
    assert [p.begin for p in parts] + [length] == [0] + [p.end for p in parts]
    assert all(0 < p.end - p.begin <= part_elements for p in parts)
    shares = [sum(p.end - p.begin for p in parts if p.owner == owner) for owner in group]
    assert max(shares) - min(shares) <= 1


@given(st.permutations(GROUP))
def test_a_sum_falls_due_with_the_last_version(order: list[str]) -> None:
    parts = cut(9, GROUP, 3)
    round_ = AllReduceRound("b", GROUP, parts, 5.0)
    assert [round_.arrived(0.0, 1, sender) for sender in order] == [False, False, True]
    assert not round_.finished
    round_.returned(0.0, 0)
    round_.returned(0.0, 2)
    assert round_.finished


def test_strangers_repeats_and_others_parts_are_refused() -> None:
    round_ = AllReduceRound("b", GROUP, cut(9, GROUP, 3), 5.0)
    round_.arrived(0.0, 1, "a")
    for index, sender in ((1, "a"), (1, "z"), (0, "a"), (99, "a")):
        with pytest.raises(ValueError):
            round_.arrived(0.0, index, sender)


def test_a_silent_sender_is_late_before_the_owner_that_waits_for_it() -> None:
    round_ = AllReduceRound("b", GROUP, cut(9, GROUP, 3), 5.0)
    round_.begin(0.0)
    round_.asked(0)
    round_.arrived(4.0, 1, "a")
    assert round_.late(4.9) == ()
    assert round_.late(5.1) == ("c",)
    round_.arrived(6.0, 1, "c")
    assert round_.late(9.4) == ()
    assert round_.late(9.6) == ("a",)


def test_who_is_heard_of_between_its_parts_is_slow_and_not_late() -> None:
    round_ = AllReduceRound("b", GROUP, cut(9, GROUP, 3), 5.0)
    round_.begin(0.0)
    round_.arrived(1.0, 1, "a")
    for now in (4.0, 8.0, 12.0):
        round_.heard(now, "c")
        round_.heard(now, "nobody")
    assert round_.late(16.9) == ()
    assert round_.late(17.1) == ("c",)


def test_progress_counts_what_comes_from_others_versions_and_sums() -> None:
    round_ = AllReduceRound("b", GROUP, cut(9, GROUP, 3), 5.0)
    assert round_.progress() == (0, 12)
    round_.arrived(0.0, 1, "b")  # our own
    assert round_.progress() == (0, 12)
    round_.arrived(0.0, 1, "a")
    round_.returned(0.0, 0)
    assert round_.progress() == (6, 12)
    round_.arrived(0.0, 1, "c")
    round_.returned(0.0, 2)
    assert round_.progress() == (12, 12)
    assert round_.finished


def test_who_fell_silent_first_is_named_not_who_waits_for_it() -> None:
    """`c` hangs as an owner; `a` sends no more because of that, and has sent less than `c` had."""
    round_ = AllReduceRound("b", GROUP, cut(18, GROUP, 3), 5.0)
    round_.begin(0.0)
    for index in (0, 1, 4):
        round_.asked(index)
    for now, sender in ((1.0, "c"), (1.1, "b"), (1.2, "a"), (2.0, "c")):
        round_.arrived(now, 2 if now < 2 else 3, sender)
    round_.arrived(2.0, 3, "b")
    round_.returned(2.1, 0)
    assert round_.late(6.9) == ()
    assert round_.late(7.5) == ("c",)


def test_what_came_last_at_one_and_the_same_time_was_heard_last() -> None:
    round_ = AllReduceRound("b", GROUP, cut(9, GROUP, 3), 5.0)
    round_.begin(0.0)
    round_.asked(0)
    round_.asked(2)
    for sender in ("c", "b", "a"):
        round_.arrived(1.0, 1, sender)
    assert round_.late(7.0) == ("c",)


def test_an_owner_that_nothing_was_sent_to_owes_nothing() -> None:
    """The sums of `c` hold up the part that `a` shall have."""
    round_ = AllReduceRound("b", GROUP, cut(9, GROUP, 3), 5.0)
    round_.begin(0.0)
    round_.asked(2)
    for sender in ("a", "b", "c"):
        round_.arrived(1.0, 1, sender)
    assert round_.late(7.0) == ("c",)
    round_.returned(7.0, 2)
    round_.asked(0)
    assert round_.late(14.0) == ("a",)


def test_a_round_of_one_needs_only_its_own_versions() -> None:
    round_ = AllReduceRound("a", ("a",), cut(4, ("a",), 2), 5.0)
    assert not round_.finished
    assert round_.arrived(0.0, 0, "a")
    assert round_.arrived(0.0, 1, "a")
    assert round_.finished


@given(st.integers(0, 5000), st.lists(st.floats(0, 1), min_size=1, max_size=9), st.integers(1, 700))
def test_shares_are_contiguous_and_as_large_as_said(length: int, scores: list[float], part_elements: int) -> None:
    if sum(scores) <= 1e-3:
        return
    shares = [score / sum(scores) for score in scores]
    group = tuple(f"p{i}" for i in range(len(shares)))
    parts = cut(length, group, part_elements, shares)
    assert [p.begin for p in parts] + [length] == [0] + [p.end for p in parts]
    assert all(0 < p.end - p.begin <= part_elements for p in parts)
    assert [p.owner for p in parts] == sorted(p.owner for p in parts)
    for owner, share in zip(group, shares, strict=True):
        owned = sum(p.end - p.begin for p in parts if p.owner == owner)
        assert abs(owned - share * length) <= len(shares)
        assert owned == 0 or share > 0


def test_a_helper_waits_for_all_senders_and_for_no_sum() -> None:
    parts = cut(4, ("a", "b", "helper"), 4, (0.5, 0.0, 0.5))
    round_ = AllReduceRound("helper", ("a", "b"), parts, 5.0)
    round_.begin(0.0)
    assert [part.owner for part in parts] == ["a", "helper"]
    assert not round_.arrived(0.0, 1, "a")
    assert round_.late(5.1) == ("b",)
    assert round_.arrived(5.2, 1, "b")
    assert round_.finished
    with pytest.raises(ValueError):
        round_.arrived(5.2, 1, "helper")


def test_a_client_waits_for_its_sums_and_for_nobodys_version() -> None:
    parts = cut(4, ("a", "b", "helper"), 4, (0.5, 0.0, 0.5))
    round_ = AllReduceRound("b", ("a", "b"), parts, 5.0)
    round_.begin(0.0)
    round_.asked(0)
    round_.asked(1)
    round_.returned(1.0, 0)
    assert round_.late(5.4) == ()
    assert round_.late(5.6) == ("helper",)
    with pytest.raises(ValueError):
        round_.arrived(0.0, 0, "a")
    round_.returned(10.2, 1)
    assert round_.finished


def test_large_equal_shares_have_few_large_parts_and_no_larger_than_asked_for() -> None:
    def sizes(length: int, part_elements: int) -> list[int]:
        parts = cut(length, ("a", "b"), part_elements)
        assert parts[-1].end == sum(part.end - part.begin for part in parts) == length
        return [part.end - part.begin for part in parts if part.owner == "a"]

    assert sizes(1 << 16, 1 << 20) == [1 << 15]
    assert sizes(1 << 20, 1 << 20) == [1 << 18] * 2
    assert sizes(10_000_000, 1 << 20) == [1_000_448] * 4 + [998_208], "all alike but for what alignment takes"
    assert max(sizes(1 << 26, 1 << 20)) == 1 << 20


def order(**changes: object) -> Prepare:
    """A conductor's order for two senders and a helper."""
    split = [Party("a", "node", 0.25), Party("b", "client", 0.0), Party("h", "aux", 0.75)]
    whole = Prepare(
        *(bytes(16), 1, 5, bytes(range(16)), b"", ["a", "b"], Mbs(), 8, 60.0),
        split=split,
        part_bytes=4096,
        elements=100,
        dtype="float32",
    )
    return msgspec.structs.replace(whole, **changes)


def test_bytes_leave_for_each_peer_at_the_rate_at_which_all_end_together() -> None:
    plan = AveragingPlan.of(decode(Prepare, encode(order(s_per_byte=1e-6))), 1 << 20, 3.0)
    sender, client, helper = (plan.pair_bytes_per_s(peer) for peer in ("a", "b", "h"))
    small, large = pytest.approx(0.95 * 0.25e6), pytest.approx(0.95 * 0.75e6)  # headers take the rest
    assert sender == {"b": small, "h": large}
    assert client == {"a": small, "h": large}
    assert helper == {"a": large, "b": large}
    assert AveragingPlan.of(order(), 1 << 20, 3.0).pair_bytes_per_s("a") == {}
    with pytest.raises(PeerdError):
        decode(Prepare, encode(order(s_per_byte=0.5)))


def test_an_order_becomes_a_plan() -> None:
    plan = AveragingPlan.of(decode(Prepare, encode(order())), 1 << 20, 3.0)
    expected = AveragingPlan(
        *(bytes(range(16)), ("a", "b", "h"), 4096, 3.0, ("a", "b"), (0.25, 0.0, 0.75), 100, "float32"),
        timeout_s=60.0,
    )
    assert plan == expected
    assert [(p.owner, p.begin, p.end) for p in plan.parts(100, 4)] == [("a", 0, 25), ("h", 25, 100)]
    plain = AveragingPlan.of(order(split=[], part_bytes=0), 1 << 20, 3.0)
    assert plain == AveragingPlan(bytes(range(16)), ("a", "b"), 1 << 20, 3.0, timeout_s=60.0)
    assert plain.senders == plain.group


def test_a_round_may_have_a_second_sum_which_is_another_attempt() -> None:
    plan = AveragingPlan.of(decode(Prepare, encode(order(further=40))), 1 << 20, 3.0)
    second = plan.second()
    assert (plan.length, plan.further, second.length, second.further) == (100, 40, 40, 0)
    assert len({plan.attempt, second.attempt, second.second().attempt}) == 3
    assert len(second.attempt) == 16
    assert second == plan.second()
    assert (plan.coming_s, second.coming_s) == (0.0, 30.0)  # others may be in the first one for half of the time
    assert msgspec.structs.asdict(order())["further"] == 0
    assert (second.group, second.senders, second.shares) == (plan.group, plan.senders, plan.shares)


@pytest.mark.parametrize(
    "split",
    [
        [("a", "node", 1.0)],  # a sender is forgotten
        [("a", "node", 0.5), ("b", "node", 0.5), ("c", "node", 0.0)],  # one too many
        [("a", "node", 0.5), ("b", "client", 0.5)],  # work for a client
        [("a", "node", 0.5), ("b", "node", 0.4)],  # a part that nobody sums
        [("a", "node", 0.9), ("b", "node", 0.9)],
        [("a", "node", math.nan), ("b", "node", 1.0)],
        [("a", "node", 0.5), ("a", "node", 0.5)],
        [("a", "node", 0.5), ("b", "node", 0.5), ("b", "aux", 0.0)],
        [("a", "node", 0.0), ("b", "node", 0.0)],
        [("a", "aux", 0.5), ("b", "node", 0.5)],  # a sender is said to be a helper
    ],
)
def test_orders_that_do_not_add_up_are_refused(split: list[tuple[str, str, float]]) -> None:
    with pytest.raises(ValueError):
        AveragingPlan.of(order(split=[Party(*party) for party in split]), 1 << 20, 3.0)


def test_plans_that_do_not_fit_together_are_refused() -> None:
    for wrong in ({"senders": ("z",)}, {"senders": ("a", "a")}, {"shares": (1.0,)}, {"shares": (2.0, -1.0)}):
        with pytest.raises(ValueError):
            AveragingPlan(b"a" * 16, ("a", "b"), 1024, 1.0, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parts"):
        AveragingPlan(b"a" * 16, ("a", "b"), 4, 1.0).parts(1 << 31, 4)


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8), st.integers(1, 20_000), st.floats(0.1, 10), st.randoms())
def test_shares_are_sent_evenly_and_none_stands_still(
    scores: list[float], length: int, under_way: float, rng: random.Random
) -> None:
    """Owners answer in any order: something may always leave until all has."""
    group = tuple(f"p{i}" for i in range(len(scores)))
    parts = cut(length, group, 200, [score / sum(scores) for score in scores])
    pace = PartPace(parts, under_way)
    left = {owner: [p for p in parts if p.owner == owner] for owner in group}
    away: dict[str, list[int]] = {owner: [] for owner in group}
    while any(left.values()) or any(away.values()):
        for owner in group:
            while left[owner] and pace.may_leave(left[owner][0]):
                away[owner].append(left[owner].pop(0).index)
        waiting = [owner for owner in group if away[owner]]
        assert waiting, "nothing is under way and nothing may leave"
        owner = rng.choice(waiting)
        pace.returned(owner)
        away[owner].pop(0)


def test_a_small_share_keeps_step_with_a_large_one() -> None:
    parts = cut(100_000, ("large", "small"), 1000, (0.9, 0.1))
    pace = PartPace(parts, 3)
    small, large = ([p for p in parts if p.owner == owner] for owner in ("small", "large"))
    leaving = [p for p in small if pace.may_leave(p)]
    assert 1 <= len(leaving) <= 2
    for _ in range(len(small)):  # however fast the small one's owner is
        leaving = [p for p in small if pace.may_leave(p)]
        pace.returned("small")
    assert len(leaving) <= 2
    assert not pace.may_leave(small[-1])
    for _ in range(45):  # the large one comes half-way
        pace.returned("large")
    assert 5 <= sum(pace.may_leave(p) for p in small) <= 7
    assert not pace.may_leave(large[-1])


def test_the_longer_a_round_takes_the_more_parts_a_share_has() -> None:
    assert [parts_of_a_share(seconds) for seconds in (1e-6, 0.05, 0.5, 2.0, 3.0, 1e6)] == [2, 3, 10, 20, 24, 24]
    assert parts_of_a_share(0.0) == 24, "not known"
    plan = AveragingPlan(b"a" * 16, ("a", "b"), 1 << 20, 3.0, shares=(0.5, 0.5), s_per_byte=1e-7)
    assert Counter(part.owner for part in plan.parts(1_250_000, 4)) == {"a": 10, "b": 10}, "0.5 s"


def test_equal_shares_are_cut_as_ever_and_small_ones_into_some_parts() -> None:
    assert [p.end for p in cut(10, ("a", "b"), 4)] == [4, 5, 9, 10]
    assert len([p for p in cut(20_000_000, ("a", "b"), 262_144, (0.99, 0.01)) if p.owner == "b"]) == 24
    assert len([p for p in cut(1_000_000, ("a", "b"), 262_144, (0.99, 0.01)) if p.owner == "b"]) == 10, "none is tiny"
