"""Topology of averaging attempts: flat or in a grid, and each member's part of the order.
Group size and failure rate.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.averaging.allreduce_round import MemberTerms, plan_of
from peerd.averaging.topology import FailureRate, GroupTopology, OrderedGroup, SumTopology, foretold_mates, group_size
from peerd.averaging.work_split import WorkSplitter
from peerd.core.limits import RPC_LEAST_BYTES_PER_S
from peerd.messages.encoding import decode, encode
from peerd.messages.swarm import Done, LineInfo, Party, Prepare, Redo
from peerd.swarm.events import (
    CancelAttempt,
    ConductorConfig,
    MemberGone,
    PrepareEnded,
    SendMove,
    SendPrepare,
    TrainerReport,
)
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello
from tests.worlds.machines.grids import order_of, rounds_of

MB = 1e6
TERMS = MemberTerms(1 << 20, 5.0)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"p{i:03}" for i in range(count))


def grouping(
    count: int, size: int = 0, elements: int = 1_000_000, mbyte_s: float = 0.0, clients: int = 0
) -> GroupTopology:
    lines = WorkSplitter()
    for i, name in enumerate(names(count)):
        mode = "client" if i < clients else "node"
        lines.tell(name, 0, LineInfo(mode, mbyte_s * MB, mbyte_s * MB, elements, "float32"))  # type: ignore[arg-type]
    return GroupTopology(lines, size)


def order_to(one: OrderedGroup, brings: bytes | None = None) -> Prepare:
    """The conductor's order to a group's senders, encoded and decoded."""
    return decode(Prepare, encode(order_of(one, b"a" * 16, brings, 60.0, last=True)))


def is_flat(found: SumTopology) -> bool:
    return len(found.groups) == 1 and not found.sides


# --- which it is ---------------------------------------------------------------------------------------------------


def test_a_group_that_fits_is_flat_and_a_larger_one_a_grid() -> None:
    assert is_flat(grouping(3, 3).order(0, names(3)))
    found = grouping(9, 3).order(0, names(9))
    assert [one.meeting.peers for one in found.groups] == [names(9)[:3], names(9)[3:6], names(9)[6:]]
    assert found.sides == (3,)
    assert "3 x 3" in found.news


def test_news_are_told_once() -> None:
    ordering = grouping(9, 3)
    assert ordering.order(0, names(9)).news
    assert not ordering.order(0, names(9)).news
    assert ordering.order(0, names(8)).news


def test_what_was_found_is_kept_until_somebody_says_something_else() -> None:
    ordering = grouping(9, 3, mbyte_s=1.0)
    first = ordering.order(0, names(9))
    assert ordering.order(0, names(9)).groups is first.groups
    ordering._lines.tell("p000", 0, LineInfo("node", 9 * MB, 9 * MB, 1_000_000, "float32"))
    again = ordering.order(0, names(9))
    assert again.groups[0] != first.groups[0]
    ordering._lines.tell("p000", 0, LineInfo("node", 9 * MB, 9 * MB, 1_000_000, "float32"))
    assert ordering.order(0, names(9)).groups is again.groups
    ordering._lines.forget("p000")
    assert ordering.order(0, names(9)).groups is not again.groups


def test_one_line_that_changes_has_its_own_groups_divided_anew_and_no_others() -> None:
    ordering = grouping(200, mbyte_s=125)
    first = rounds_of(ordering, names(200))
    ordering._lines.tell("p000", 0, LineInfo("node", 9 * MB, 9 * MB, 1_000_000, "float32"))
    again = rounds_of(ordering, names(200))
    pairs = [pair for before, after in zip(first, again, strict=True) for pair in zip(before, after, strict=True)]
    anew = [after.meeting.peers for before, after in pairs if before.split is not after.split]
    assert anew == [one.meeting.peers for groups in again for one in groups if "p000" in one.meeting.peers]


@given(st.integers(4, 300), st.integers(3, 30), st.data())
def test_sums_are_joined_in_the_rounds_of_the_grid(count: int, size: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(0, min(count // 4, 5)))
    found = rounds_of(grouping(count, size, mbyte_s=1.0, clients=clients), names(count))
    has = {peer: frozenset({peer}) for peer in names(count)}
    for groups in found:
        sums = {one: [has[peer] for peer in one.meeting.senders] for one in groups}
        for brought in sums.values():
            assert sum(map(len, brought)) == len(frozenset().union(*brought)), "something is summed twice"
        has = {peer: frozenset().union(*sums[one]) for one in groups for peer in one.meeting.peers}
    assert set(has.values()) == {frozenset(names(count))}


def test_an_attempt_may_take_what_slow_lines_need_for_the_size_that_most_of_the_group_tell() -> None:
    def most_s(elements: int, mbyte_s: float = 0.0) -> float:
        ordering = grouping(3, 3, mbyte_s=mbyte_s)
        for peer, told in zip(names(3), (elements, elements, 1 << 30), strict=True):
            line = LineInfo("node", mbyte_s * 1e6, mbyte_s * 1e6, told, "float32")
            ordering._lines.tell(peer, 0, line)
        return ordering.order(0, names(3)).groups[0].most_s

    assert most_s(85_000_000) == 2 * 340e6 / RPC_LEAST_BYTES_PER_S
    assert most_s(850_000_000) == 10 * most_s(85_000_000), "no constant bounds it"
    assert most_s(85_000_000, mbyte_s=0.004) > 4 * 340e6 / 0.004e6, "known lines are slower than that"


def test_a_small_stage_and_one_on_slow_or_unknown_lines_are_flat() -> None:
    for count, mbyte_s in ((2, 125), (8, 125), (9, 0), (64, 0), (64, 12.5)):
        assert is_flat(grouping(count, mbyte_s=mbyte_s).order(0, names(count)))


def failing(ordering: GroupTopology, members: int) -> GroupTopology:
    for _ in range(100):
        ordering.observe(members, names(members // 8))
    return ordering


@pytest.mark.parametrize(("elements", "grid"), [(1_000_000, True), (100_000_000, False)])
def test_a_large_stage_on_fast_lines_has_a_grid_unless_that_takes_longer(elements: int, grid: bool) -> None:
    """A small vector is soon moved several times, and a large one is not."""
    ordering = grouping(150, elements=elements, mbyte_s=125)
    assert is_flat(ordering.order(0, names(150))) != grid


def test_where_many_fail_groups_are_smaller_and_rounds_more() -> None:
    calm, often = grouping(150, mbyte_s=125), failing(grouping(150, mbyte_s=125), 150)
    assert [len(one.order(0, names(150)).sides) for one in (calm, often)] == [1, 2]


def test_what_no_peer_can_hold_connections_for_is_a_grid_though_it_takes_longer() -> None:
    found = grouping(300, elements=10_000_000, mbyte_s=12.5).order(0, names(300))
    assert len(found.sides) == 1


def test_before_vectors_are_known_a_stage_is_flat() -> None:
    assert is_flat(failing(grouping(150, elements=0), 150).order(0, names(150)))


def test_clients_are_spread_and_too_many_of_them_make_the_round_flat() -> None:
    for one in (one for groups in rounds_of(grouping(9, 3, mbyte_s=1.0, clients=3), names(9)) for one in groups):
        assert one.split is not None
        assert [p.share for p in one.split.parties if p.mode == "client"] == [0.0]
    flat = grouping(9, 3, mbyte_s=1.0, clients=8).order(0, names(9))
    assert is_flat(flat)
    assert flat.groups[0].split is not None


def test_helpers_take_part_in_flat_rounds_only() -> None:
    for size, helped in ((0, True), (3, False)):
        ordering = grouping(9, size, mbyte_s=1.0)
        ordering._lines.tell("helper", 0, LineInfo("aux", 100 * MB, 100 * MB))
        groups = [one for found in rounds_of(ordering, names(9)) for one in found]
        assert {one.helpers for one in groups} == {frozenset({"helper"}) if helped else frozenset()}
        for one in groups:
            assert one.split is not None
            assert ("helper" in {p.peer for p in one.split.parties}) == helped
            assert "helper" not in one.meeting.peers


@given(st.integers(2, 60), st.integers(3, 12))
def test_a_member_foretells_whom_it_meets(count: int, size: int) -> None:
    found = rounds_of(grouping(count, size), names(count))
    for peer in names(count):
        mates = foretold_mates(peer, set(names(count)), size)
        if len(found) == 1:
            assert mates is None
            continue
        groups = (one.meeting.peers for groups in found for one in groups)
        assert mates == {other for peers in groups if peer in peers for other in peers}
    assert not foretold_mates("helper", set(names(count)), size)


# --- what a member makes of it -------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.integers(4, 200), st.integers(3, 30), st.booleans())
def test_a_member_of_each_group_has_its_plan(count: int, size: int, known: bool) -> None:
    for groups in rounds_of(grouping(count, size, mbyte_s=float(known)), names(count)):
        for one in groups:
            order = order_to(one)
            assert len(encode(order)) < 100_000
            plan = plan_of(order, one.meeting.peers[0], TERMS)
            assert (plan.senders, plan.listeners) == (one.meeting.senders, one.meeting.listeners)
            assert (plan.copy, plan.copies) == (one.meeting.copy, one.meeting.copies)
            assert sorted(plan.group) == sorted(one.meeting.peers)


def good() -> Prepare:
    """The order of a second round, in which one of five members is left over, and listens."""
    (one,) = [one for one in rounds_of(grouping(5, 3, mbyte_s=1.0), names(5))[1] if len(one.meeting.peers) == 3]
    return order_to(one, b"b" * 16)


def test_a_good_order_is_taken() -> None:
    order = good()
    assert order.group == ["p000", "p002", "p004"]
    assert order.listeners == ["p004"]
    for peer, brings in (("p000", b"b" * 16), ("p004", None), ("p004", b"b" * 16)):
        assert plan_of(msgspec.structs.replace(order, brings=brings), peer, TERMS)


def swapped(order: Prepare) -> list[Party]:
    return [msgspec.structs.replace(party, mode="client") for party in order.split]


BAD: dict[str, Callable[[Prepare], dict[str, object]]] = {
    "not mine": lambda o: {"group": ["p001", "p003"], "listeners": [], "split": []},
    "twice": lambda o: {"group": ["p000", "p000"], "listeners": [], "split": []},
    "a listener twice": lambda o: {"listeners": ["p004", "p004"]},
    "a strange listener": lambda o: {"listeners": ["stranger"]},
    "a listener with second factors": lambda o: {"listeners": ["p000"], "second": True},
    "a copy too many": lambda o: {"copy": 2},
    "a second sum of nothing": lambda o: {"brings": None, "second": True},
    "a second sum and one after it": lambda o: {"second": True, "further": 10},
    "a client with a share": lambda o: {"split": swapped(o)},
    "a party too few": lambda o: {"split": o.split[1:]},
    "a member as helper": lambda o: {"split": [*o.split[1:], Party("p000", "aux", 0.5)]},
    "shares beyond one": lambda o: {"split": [msgspec.structs.replace(party, share=1.0) for party in o.split]},
}


@pytest.mark.parametrize("what", BAD)
def test_an_order_that_does_not_fit_together_is_refused(what: str) -> None:
    order = good()
    with pytest.raises(ValueError, match=r"."):
        plan_of(msgspec.structs.replace(order, **BAD[what](order)), "p000", TERMS)


# --- the conductor -------------------------------------------------------------------------------------------------


def ordered(conductor: Conductor, members: tuple[str, ...]) -> list[SendPrepare]:
    """The orders to members of one stage, each with one microbatch, of a trainer "t" that does no more."""
    for peer in members:
        conductor.handle(0.0, hello(peer))
    conductor.wake(2.0)
    seqs = tuple(range(len(members)))
    conductor.handle(2.0, TrainerReport("t", 0, seqs, ()))
    done = tuple(Done(seq, [peer]) for seq, peer in zip(seqs, members, strict=True))
    return [o for o in conductor.handle(2.0, TrainerReport("t", 0, (), done)) if isinstance(o, SendPrepare)]


def test_a_group_that_fails_is_ordered_anew_without_the_lost_and_others_keep_their_sums() -> None:
    """Nine members; in the first round one is lost, in the second round another one."""
    config = ConductorConfig(stages=1, microbatches=9, gather_s=1.0, group_size=3)
    conductor = Conductor(config, random.Random(1), 0.0)
    orders = ordered(conductor, names(9))
    groups = {order.attempt: order.group for order in orders}
    assert list(groups.values()) == [names(9)[:3], names(9)[3:6], names(9)[6:]]
    first, second, third = groups

    def end(attempt: bytes, *peers: str, now: float = 2.5) -> list[SendPrepare]:
        out = [o for peer in peers for o in conductor.handle(now, PrepareEnded(peer, attempt, True, digest=attempt))]
        return [output for output in out if isinstance(output, SendPrepare)]

    assert not end(first, *groups[first]) + end(second, *groups[second])
    out = conductor.handle(2.6, PrepareEnded("p006", third, False, (), ("p007",)))
    out += conductor.handle(2.7, MemberGone("p007"))
    assert [output for output in out if isinstance(output, CancelAttempt)] == [CancelAttempt(third)]
    assert conductor.redo("t") == [Redo(7, 0)]
    out += conductor.handle(2.8, TrainerReport("t", 0, (), (Done(7, ["p006"]),)))
    again = [order for order in (*out, *conductor.wake(3.0)) if isinstance(order, SendPrepare)]
    assert [(order.peer, order.group, order.last) for order in again] == [
        (peer, ("p006", "p008"), False) for peer in ("p006", "p008")
    ]
    joined = end(again[0].attempt, "p006", "p008", now=3.1)
    columns = {order.attempt: (order.group, order.listeners) for order in joined}
    assert [*columns.values()] == [
        (("p000", "p004", "p006", "p002"), ("p002",)),
        (("p001", "p003", "p008", "p005"), ("p005",)),
    ]
    brought = {order.peer: order.brings for order in joined}
    assert [brought[peer] for peer in ("p000", "p003", "p008", "p005")] == [first, second, again[0].attempt, second]
    other, one = columns
    out = conductor.handle(3.2, MemberGone("p003"))
    assert [output for output in out if isinstance(output, CancelAttempt)] == [CancelAttempt(one)]
    copied = end(other, *columns[other][0], now=3.5)
    assert {order.group for order in copied} == {("p000", "p001", "p005", "p008")}
    assert copied[0].listeners == ("p001", "p005", "p008")
    out = [
        output
        for order in copied
        for output in conductor.handle(4.0, PrepareEnded(order.peer, order.attempt, True, digest=other))
    ]
    moves = [output.peer for output in out if isinstance(output, SendMove)]
    assert moves == [name for name in names(9) if name not in ("p003", "p007")]


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
