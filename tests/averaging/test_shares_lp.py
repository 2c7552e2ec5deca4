"""Shares where pairs of peers are limited: the closed form where nothing binds, and the well-known strategies."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.averaging.shares import MemberLine, Mode, NoSplit, bound_s_per_byte, shares
from peerd.averaging.shares_lp import pair_bound_s_per_byte, shares_within, solved
from tests.kit.amount import examples

NODE, CLIENT, AUX = Mode.NODE, Mode.CLIENT, Mode.AUX
pytestmark = pytest.mark.slow  # scipy takes half a second to import


def swarm(*peers: tuple[Mode, float]) -> list[MemberLine]:
    return [MemberLine(f"p{i:03}", mode, rate, rate) for i, (mode, rate) in enumerate(peers)]


def both_ways(pairs: dict[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    return pairs | {(b, a): rate for (a, b), rate in pairs.items()}


def whole_bound(lines: list[MemberLine], pairs: dict[tuple[str, str], float], fractions: dict[str, float]) -> float:
    return max(bound_s_per_byte(lines, fractions), pair_bound_s_per_byte(lines, pairs, fractions))


@st.composite
def swarms(draw: st.DrawFn) -> list[MemberLine]:
    modes = draw(st.lists(st.sampled_from(Mode), min_size=3, max_size=8))
    modes[:2] = [NODE, draw(st.sampled_from((NODE, CLIENT)))]
    return swarm(*((mode, draw(st.floats(1.0, 100.0))) for mode in modes))


@settings(max_examples=examples(40))
@given(swarms())
def test_without_limits_the_solver_finds_the_closed_form(lines: list[MemberLine]) -> None:
    closed, found = shares(lines), solved(lines, {})
    assert found.xi_s_per_byte == pytest.approx(closed.xi_s_per_byte, rel=1e-6)
    assert list(found.fractions.values()) == pytest.approx([closed.fractions[p] for p in found.fractions], abs=1e-5)


@settings(max_examples=examples(40))
@given(swarms(), st.data())
def test_limits_that_do_not_bind_change_no_bit(lines: list[MemberLine], data: st.DataObject) -> None:
    closed = shares(lines)
    chosen = data.draw(st.lists(st.sampled_from(list(itertools.permutations(closed.fractions, 2))), max_size=6))
    roomy = dict.fromkeys(chosen, 2.0 / max(closed.xi_s_per_byte, 1e-9))  # no pair ever carries two vectors
    assert shares_within(lines, roomy) == closed


@settings(max_examples=examples(40))
@given(swarms(), st.data())
def test_limits_are_kept_and_no_simple_division_is_faster(lines: list[MemberLine], data: st.DataObject) -> None:
    names = [line.peer for line in lines]
    chosen = data.draw(st.lists(st.sampled_from(list(itertools.permutations(names, 2))), max_size=8))
    pairs = {pair: data.draw(st.floats(0.1, 50.0)) for pair in chosen}
    found = shares_within(lines, pairs)
    time = whole_bound(lines, pairs, found.fractions)
    if found.xi_s_per_byte > 0:
        assert time == pytest.approx(found.xi_s_per_byte, rel=1e-4)
    assert all(found.fractions[line.peer] == 0 for line in lines if line.mode is CLIENT)
    owners = [line.peer for line in lines if line.mode is not CLIENT]
    for rivals in [owners, *([owner] for owner in owners)]:
        rival = {line.peer: (line.peer in rivals) / len(rivals) for line in lines}
        assert time <= whole_bound(lines, pairs, rival) * (1 + 1e-4)
    assert shares_within(lines[::-1], dict(reversed(pairs.items()))).fractions == found.fractions


def test_equal_peers_do_all_reduce() -> None:
    lines = swarm(*[(NODE, 5.0)] * 6)
    for found in (shares_within(lines, {}), solved(lines, {})):
        assert list(found.fractions.values()) == pytest.approx([1 / 6] * 6, abs=1e-6)
        assert found.xi_s_per_byte == pytest.approx((1 + 4 / 6) / 5.0)  # what a ring would take: 2 (n - 1) / n


def test_one_wide_line_is_a_parameter_server() -> None:
    lines = swarm(*[(NODE, 1.0)] * 5, (NODE, 100.0))
    for found in (shares_within(lines, {}), solved(lines, {})):
        assert found.fractions["p005"] == pytest.approx(1, abs=1e-6)
        assert found.xi_s_per_byte == pytest.approx(1)  # each sends its vector once and gets the sum once


def test_helpers_beside_the_senders_are_byteps() -> None:
    """With as many helpers as senders, all as wide, helpers sum more than senders, and each sender's load is lowest."""
    lines = swarm(*[(NODE, 1.0)] * 4, *[(AUX, 1.0)] * 4)
    for found in (shares_within(lines, {}), solved(lines, {})):
        senders, helpers = found.fractions["p000"], found.fractions["p004"]
        assert found.xi_s_per_byte == pytest.approx(1.0)  # against 1.5 without helpers
        assert (senders, helpers) == pytest.approx((0, 0.25), abs=1e-6)
    fewer = shares_within(swarm(*[(NODE, 1.0)] * 4, *[(AUX, 1.0)] * 2), {})
    # cap_node = (xi - 1) / 2 and cap_aux = xi / 4 fill up at xi = 1.2.
    assert fewer.xi_s_per_byte == pytest.approx(1.2)
    assert list(fewer.fractions.values()) == pytest.approx([0.1] * 4 + [0.3] * 2, abs=1e-6)


def test_peers_that_reach_each_other_only_in_pairs_can_only_gossip() -> None:
    """One exact round needs an owner in reach of all senders; without one, each pair averages for itself."""
    lines = swarm(*[(NODE, 1.0)] * 4)
    across = both_ways({(a, b): 0.0 for a in ("p000", "p001") for b in ("p002", "p003")})
    with pytest.raises(NoSplit, match="reach"):
        shares_within(lines, across)
    for island in (["p000", "p001"], ["p002", "p003"]):
        found = shares_within([line for line in lines if line.peer in island], across)
        assert list(found.fractions.values()) == [0.5, 0.5]
        assert found.xi_s_per_byte == 1.0
    # A trickle between the pairs makes an exact round possible, and as slow as the trickle: gossip is 26 times faster.
    trickle = dict.fromkeys(across, 0.01)
    assert shares_within(lines, trickle).xi_s_per_byte > 25


def test_nodes_that_reach_only_a_helper_leave_it_everything() -> None:
    lines = swarm(*[(NODE, 1.0)] * 3, (AUX, 2.0))
    apart = dict.fromkeys(itertools.permutations(("p000", "p001", "p002"), 2), 0.0)
    found = shares_within(lines, apart)
    assert found.fractions == {"p000": 0.0, "p001": 0.0, "p002": 0.0, "p003": 1.0}
    assert found.xi_s_per_byte == pytest.approx(1.5)


def test_a_narrow_pair_moves_work_to_others() -> None:
    lines = swarm(*[(NODE, 1.0)] * 4)
    pairs = both_ways({("p000", "p001"): 0.1})
    found = shares_within(lines, pairs)
    assert found.fractions["p000"] + found.fractions["p001"] <= 0.1 * found.xi_s_per_byte * (1 + 1e-4)
    assert found.fractions["p000"] == pytest.approx(found.fractions["p001"], abs=1e-5)
    assert found.fractions["p002"] == pytest.approx(found.fractions["p003"], abs=1e-5)
    assert 1.5 < found.xi_s_per_byte < 2


def test_pairs_count_where_no_line_is_known() -> None:
    lines = [MemberLine(name) for name in "abc"]
    found = shares_within(lines, {("a", "b"): 10.0, ("b", "a"): 10.0, ("a", "c"): 1000.0})
    assert found.fractions["c"] > 0.9


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_what_is_no_limit_is_refused(rate: float) -> None:
    with pytest.raises(ValueError):
        shares_within([MemberLine("a"), MemberLine("b")], {("a", "b"): rate})
