"""Topology of averaging attempts: flat or in a grid, and each member's part of the order."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import ProtocolViolation
from peerd.core.limits import RPC_LEAST_BYTES_PER_S
from peerd.core.messages.encoding import decode, encode
from peerd.core.messages.swarm import GridRound, LineInfo, Mbs, Party, Prepare
from peerd.machine.averaging.allreduce import AveragingPlan
from peerd.machine.averaging.member_plan import Terms, attempt_of, plans_of
from peerd.machine.averaging.topology import Grouping, Ordered, foretold_mates
from peerd.machine.averaging.work_split import Lines
from peerd.machine.conductor.conductor import Conductor, ConductorConfig
from peerd.machine.swarm.events import CancelAttempt, MemberGone, PrepareEnded, SendMove, SendPrepare
from tests.worlds.machines.conducting import first_order

MB = 1e6
TERMS = Terms(1 << 20, 5.0)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"p{i:03}" for i in range(count))


def grouping(count: int, size: int = 0, elements: int = 1_000_000, mbyte_s: float = 0.0, clients: int = 0) -> Grouping:
    lines = Lines()
    for i, name in enumerate(names(count)):
        mode = "client" if i < clients else "node"
        lines.tell(name, 0, LineInfo(mode, mbyte_s * MB, mbyte_s * MB, elements, "float32"))  # type: ignore[arg-type]
    return Grouping(lines, size)


def order_to(found: Ordered, peer: str) -> Prepare:
    """The conductor's order to `peer`, encoded and decoded."""
    met = sorted({other for one in found.rounds[peer] for other in one.meeting.peers})
    rounds = [one.message() for one in found.rounds[peer]]
    return decode(Prepare, encode(Prepare(bytes(16), 1, 5, b"a" * 16, b"", met, Mbs(), 8, 60.0, rounds=rounds)))


# --- which it is ---------------------------------------------------------------------------------------------------


def test_a_group_that_fits_is_flat_and_a_larger_one_a_grid() -> None:
    assert not grouping(3, 3).order(0, names(3)).rounds
    found = grouping(9, 3).order(0, names(9))
    assert set(found.rounds) == set(names(9))
    assert {len(rounds) for rounds in found.rounds.values()} == {2}
    assert max(len(one.meeting.peers) for rounds in found.rounds.values() for one in rounds) == 3
    assert "3 x 3" in found.news


def test_news_are_told_once() -> None:
    ordering = grouping(9, 3)
    assert ordering.order(0, names(9)).news
    assert not ordering.order(0, names(9)).news
    assert ordering.order(0, names(8)).news


def test_what_was_found_is_kept_until_somebody_says_something_else() -> None:
    ordering = grouping(9, 3, mbyte_s=1.0)
    first = ordering.order(0, names(9))
    assert ordering.order(0, names(9)).rounds is first.rounds
    ordering._lines.tell("p000", 0, LineInfo("node", 9 * MB, 9 * MB, 1_000_000, "float32"))
    again = ordering.order(0, names(9))
    assert again.rounds["p000"] != first.rounds["p000"]
    ordering._lines.tell("p000", 0, LineInfo("node", 9 * MB, 9 * MB, 1_000_000, "float32"))
    assert ordering.order(0, names(9)).rounds is again.rounds
    ordering._lines.forget("p000")
    assert ordering.order(0, names(9)).rounds is not again.rounds


def test_one_line_that_changes_has_its_own_groups_divided_anew_and_no_others() -> None:
    ordering = grouping(200, mbyte_s=125)
    first = ordering.order(0, names(200)).rounds
    ordering._lines.tell("p000", 0, LineInfo("node", 9 * MB, 9 * MB, 1_000_000, "float32"))
    again = ordering.order(0, names(200)).rounds
    pairs = ((peer, *both) for peer in names(200) for both in zip(first[peer], again[peer], strict=True))
    anew = {peer for peer, before, after in pairs if before.split is not after.split}
    assert anew == {other for one in again["p000"] for other in one.meeting.peers}
    assert len(anew) < 50


def test_members_hear_how_long_earlier_rounds_take_where_all_lines_are_known() -> None:
    known = grouping(150, mbyte_s=125).order(0, names(150)).rounds["p000"]
    assert known[0].message().earlier_s == 0
    assert 0.1 < known[1].message().earlier_s < 1  # 4 MB at 125 MB/s, and what mates cost
    ordering = grouping(150, 20, mbyte_s=125)
    ordering._lines.tell("p149", 0, LineInfo("node", 0, 0, 2_000_000, "float32"))  # another vector: no model
    assert [one.earlier_s for one in ordering.order(0, names(150)).rounds["p000"]] == [0, 0]
    assert [one.earlier_s for one in grouping(9, 3).order(0, names(9)).rounds["p000"]] == [0, 0]


def test_an_attempt_may_take_what_slow_lines_need_for_the_size_that_most_of_the_group_tell() -> None:
    def most_s(elements: int, mbyte_s: float = 0.0) -> float:
        ordering = grouping(3, 3, mbyte_s=mbyte_s)
        for peer, told in zip(names(3), (elements, elements, 1 << 30), strict=True):
            line = LineInfo("node", mbyte_s * 1e6, mbyte_s * 1e6, told, "float32")
            ordering._lines.tell(peer, 0, line)
        return ordering.order(0, names(3)).most_s

    assert most_s(85_000_000) == 2 * 340e6 / RPC_LEAST_BYTES_PER_S
    assert most_s(850_000_000) == 10 * most_s(85_000_000), "no constant bounds it"
    assert most_s(85_000_000, mbyte_s=0.004) > 4 * 340e6 / 0.004e6, "known lines are slower than that"


def test_a_small_stage_and_one_on_slow_or_unknown_lines_are_flat() -> None:
    for count, mbyte_s in ((2, 125), (8, 125), (9, 0), (64, 0), (64, 12.5)):
        assert not grouping(count, mbyte_s=mbyte_s).order(0, names(count)).rounds


def failing(ordering: Grouping, members: int) -> Grouping:
    for _ in range(100):
        ordering.observe(members, names(members // 8))
    return ordering


@pytest.mark.parametrize(("elements", "grid"), [(1_000_000, True), (100_000_000, False)])
def test_a_large_stage_on_fast_lines_has_a_grid_unless_that_takes_longer(elements: int, grid: bool) -> None:
    """A small vector is soon moved several times, and a large one is not."""
    ordering = grouping(150, elements=elements, mbyte_s=125)
    assert bool(ordering.order(0, names(150)).rounds) == grid


def test_where_many_fail_groups_are_smaller_and_rounds_more() -> None:
    calm, often = grouping(150, mbyte_s=125), failing(grouping(150, mbyte_s=125), 150)
    shapes = [{len(rounds) for rounds in one.order(0, names(150)).rounds.values()} for one in (calm, often)]
    assert shapes == [{2}, {3}]


def test_what_no_peer_can_hold_connections_for_is_a_grid_though_it_takes_longer() -> None:
    found = grouping(300, elements=10_000_000, mbyte_s=12.5).order(0, names(300))
    assert {len(rounds) for rounds in found.rounds.values()} == {2}


def test_before_vectors_are_known_a_stage_is_flat() -> None:
    assert not failing(grouping(150, elements=0), 150).order(0, names(150)).rounds


def test_clients_are_spread_and_too_many_of_them_make_the_round_flat() -> None:
    found = grouping(9, 3, mbyte_s=1.0, clients=3).order(0, names(9))
    for rounds in found.rounds.values():
        for one in rounds:
            assert one.split is not None
            assert [p.share for p in one.split.parties if p.mode == "client"] == [0.0]
    flat = grouping(9, 3, mbyte_s=1.0, clients=8).order(0, names(9))
    assert not flat.rounds
    assert flat.split is not None


def test_helpers_take_part_in_flat_rounds_only() -> None:
    for size, helped in ((0, True), (3, False)):
        ordering = grouping(9, size, mbyte_s=1.0)
        ordering._lines.tell("helper", 0, LineInfo("aux", 100 * MB, 100 * MB))
        found = ordering.order(0, names(9))
        assert found.helpers == (frozenset({"helper"}) if helped else frozenset())
        assert all(
            "helper" not in one.meeting.peers and one.split and "helper" not in {p.peer for p in one.split.parties}
            for rounds in found.rounds.values()
            for one in rounds
        )


@given(st.integers(2, 60), st.integers(3, 12))
def test_a_member_foretells_whom_it_meets(count: int, size: int) -> None:
    found = grouping(count, size).order(0, names(count))
    for peer in names(count):
        mates = foretold_mates(peer, set(names(count)), size)
        if not found.rounds:
            assert mates is None
            continue
        assert mates == {other for one in found.rounds[peer] for other in one.meeting.peers}
    assert not foretold_mates("helper", set(names(count)), size)


# --- what a member makes of it -------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.integers(4, 200), st.integers(3, 30), st.booleans())
def test_all_members_of_a_group_have_the_same_plan_of_it(count: int, size: int, known: bool) -> None:
    found = grouping(count, size, mbyte_s=float(known)).order(0, names(count))
    if not found.rounds:
        assert count <= size
        return
    seen: dict[tuple[bytes, tuple[str, ...]], AveragingPlan] = {}
    for peer in names(count):
        order = order_to(found, peer)
        assert len(encode(order)) < 100_000
        for number, plan in enumerate(plans_of(order, peer, TERMS)):
            assert plan.attempt == attempt_of(order.attempt, number)
            assert peer in plan.senders or peer in plan.listeners
            assert not {*plan.mates} & {*plan.group}
            first = seen.setdefault((plan.attempt, plan.group), plan)
            assert replace(plan, mates=first.mates) == first  # each has other mates elsewhere


def good(peer: str = "p000") -> Prepare:
    return order_to(grouping(5, 3, mbyte_s=1.0).order(0, names(5)), peer)


def changed(order: Prepare, number: int, **changes: object) -> Prepare:
    rounds = list(order.rounds)
    rounds[number] = msgspec.structs.replace(rounds[number], **changes)
    return msgspec.structs.replace(order, rounds=rounds)


def test_a_good_order_is_taken() -> None:
    for peer in names(5):
        assert len(plans_of(good(peer), peer, TERMS)) == 2


def swapped(order: Prepare, number: int) -> list[Party]:
    return [msgspec.structs.replace(party, mode="client") for party in order.rounds[number].split]


BAD = {
    "not mine": lambda o: changed(o, 1, senders=["p001", "p003"], listeners=[], split=[]),
    "strangers": lambda o: changed(o, 1, senders=["p000", "stranger"], listeners=[], split=[]),
    "twice": lambda o: changed(o, 1, senders=["p000", "p000"], listeners=[], split=[]),
    "both": lambda o: changed(o, 1, senders=["p000", "p002"], listeners=["p002"], split=[]),
    "mine does not count": lambda o: changed(o, 0, senders=["p001"], listeners=["p000"], split=[]),
    "a copy too many": lambda o: changed(o, 1, copy=2),
    "a client with a share": lambda o: changed(o, 1, split=swapped(o, 1)),
    "a party too few": lambda o: changed(o, 1, split=o.rounds[1].split[1:]),
    "a helper": lambda o: changed(o, 1, split=[*o.rounds[1].split[1:], Party("p000", "aux", 0.5)]),
    "two divisions": lambda o: msgspec.structs.replace(o, split=o.rounds[0].split),
    "shares beyond one": lambda o: changed(
        o, 1, split=[msgspec.structs.replace(party, share=1.0) for party in o.rounds[1].split]
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_an_order_that_does_not_fit_together_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        plans_of(BAD[what](good()), "p000", TERMS)


def test_a_grid_is_no_order_for_one_round() -> None:
    with pytest.raises(ValueError, match="one round"):
        AveragingPlan.of(good(), 1024, 5.0)


@given(st.binary(min_size=16, max_size=16), st.integers(0, 11), st.integers(0, 11))
def test_rounds_have_ids_of_their_own(attempt: bytes, one: int, other: int) -> None:
    assert (attempt_of(attempt, one) == attempt_of(attempt, other)) == (one == other)
    assert attempt_of(attempt, one) != attempt
    assert len(attempt_of(attempt, one)) == 16


def test_too_many_rounds_and_peers_are_refused_by_the_codec() -> None:
    round_ = GridRound(["p000"], [], 0, 1, [], 0)
    order = msgspec.structs.replace(good(), rounds=[round_] * 13)
    with pytest.raises(ProtocolViolation):
        decode(Prepare, encode(order))


# --- the conductor -------------------------------------------------------------------------------------------------


def test_an_attempt_that_fails_in_any_group_is_ordered_anew_without_the_lost() -> None:
    """Nine members; one says that another was lost in the second round, while others have the whole sum."""
    conductor = Conductor(ConductorConfig(stages=1, microbatches=1, gather_s=1.0, group_size=3), random.Random(1), 0.0)
    orders = first_order(conductor, names(9), "p000")
    assert [len(order.rounds) for order in orders] == [2] * 9
    assert orders[4].meets == ("p001", "p003", "p004", "p005", "p007")
    for peer in ("p001", "p002"):
        conductor.handle(2.5, PrepareEnded(peer, orders[0].attempt, True))
    out = conductor.handle(2.6, PrepareEnded("p000", orders[0].attempt, False, (), ("p006",)))
    out += conductor.handle(2.7, MemberGone("p006"))
    assert CancelAttempt(orders[0].attempt) in out
    again = [order for order in (*out, *conductor.wake(3.0)) if isinstance(order, SendPrepare)]
    assert [order.peer for order in again] == [name for name in names(9) if name != "p006"]
    assert {order.attempt for order in again}.isdisjoint({order.attempt for order in orders})
    assert [len(order.rounds) for order in again] == [3] * 8
    moves = [o for name in names(9) for o in conductor.handle(3.5, PrepareEnded(name, again[0].attempt, True))]
    assert [move.peer for move in moves if isinstance(move, SendMove) and move.commit] == [o.peer for o in again]
