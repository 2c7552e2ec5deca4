"""The grid of a run: every contribution counts once, whatever the number of peers, and all end with the same bits."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.averaging.moshpit import MoshpitGroup, grid_of, grid_within, largest_group, meetings

swarms = st.tuples(st.integers(1, 200), st.integers(3, 40))


def names(count: int) -> list[str]:
    return [f"p{i:03}" for i in range(count)]


def grid(swarm: tuple[int, int]) -> list[list[MoshpitGroup]]:
    peers, largest = swarm
    return meetings(names(peers), grid_within(peers, largest))


@given(swarms)
def test_every_peer_has_one_group_in_each_round_and_none_is_larger_than_allowed(swarm: tuple[int, int]) -> None:
    for groups in grid(swarm):
        assert sorted(peer for one in groups for peer in one.peers) == names(swarm[0])
        assert max(len(one.peers) for one in groups) <= swarm[1]
        assert largest_group(swarm[0], grid_within(*swarm)) <= swarm[1]


@given(swarms)
def test_after_the_last_round_everyone_has_each_contribution_once(swarm: tuple[int, int]) -> None:
    held = {peer: Counter([peer]) for peer in names(swarm[0])}
    for groups in grid(swarm):
        held = sums(groups, held)
    assert all(bag == Counter(names(swarm[0])) for bag in held.values())


def sums(groups: list[MoshpitGroup], held: dict[str, Counter[str]]) -> dict[str, Counter[str]]:
    """One round: what each peer holds after it."""
    found = {}
    for one in groups:
        assert all(any(held[peer] == held[sender] for sender in one.senders) for peer in one.listeners)
        total = sum((held[peer] for peer in one.senders), Counter[str]())
        found |= dict.fromkeys(one.peers, total)
    return found


@given(swarms, st.integers(0, 2**32 - 1))
def test_sums_in_the_order_of_the_senders_end_with_the_same_bits(swarm: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    held = {peer: rng.standard_normal(4, dtype="float32") for peer in names(swarm[0])}
    exact = np.sum([vector.astype("float64") for vector in held.values()], axis=0)
    for groups in grid(swarm):
        found: dict[str, np.ndarray] = {}
        for one in groups:
            total = held[one.senders[0]].copy()
            for peer in one.senders[1:]:
                total += held[peer]
            found |= dict.fromkeys(one.peers, total)
        held = found
    assert len({vector.tobytes() for vector in held.values()}) == 1
    assert np.abs(held["p000"] - exact).max() < 1e-4


@given(swarms)
def test_who_sends_beside_another_has_not_met_it_before(swarm: tuple[int, int]) -> None:
    met = set[tuple[str, str]]()
    for groups in grid(swarm):
        senders = {pair for one in groups for pair in itertools.combinations(sorted(one.senders), 2)}
        assert not senders & met
        met |= {pair for one in groups for pair in itertools.combinations(sorted(one.peers), 2)}


@given(swarms)
def test_groups_that_make_the_same_sum_are_numbered(swarm: tuple[int, int]) -> None:
    held = {peer: frozenset([peer]) for peer in names(swarm[0])}
    for groups in grid(swarm):
        made: dict[frozenset[str], list[MoshpitGroup]] = {}
        for one in groups:
            made.setdefault(frozenset().union(*(held[peer] for peer in one.senders)), []).append(one)
        for alike in made.values():
            assert [one.copy for one in alike] == list(range(len(alike)))
            assert {one.copies for one in alike} == {len(alike)}
        held = {peer: total for total, alike in made.items() for one in alike for peer in one.peers}


@given(st.integers(2, 200), st.integers(3, 20), st.randoms())
def test_peers_that_cannot_sum_are_spread_while_there_are_twice_as_many_others(
    peers: int, largest: int, rng: random.Random
) -> None:
    weak = set(rng.sample(names(peers), peers // 3))
    for groups in meetings(names(peers), grid_within(peers, largest), weak):
        for one in groups:
            assert len(one.peers) == 1 or set(one.peers) - weak


@given(st.integers(4, 200), st.integers(2, 4))
def test_a_grid_of_so_many_rounds_has_groups_near_the_root(peers: int, rounds: int) -> None:
    if peers < 2**rounds:
        return
    sides = grid_of(peers, rounds)
    assert len(sides) == rounds
    assert largest_group(peers, sides) <= round(peers ** (1 / rounds)) + 2
    assert len(meetings(names(peers), sides)) == rounds


def test_known_grids() -> None:
    assert [grid_within(peers, 3) for peers in (3, 4, 5, 8, 9, 27)] == [
        (3,),
        (2, 2),
        (3, 2),
        (2, 2, 2),
        (3, 3),
        (3, 3, 3),
    ]
    assert [grid_of(peers, 2) for peers in (16, 17, 64, 100)] == [(4, 4), (5, 4), (8, 8), (10, 10)]
    assert meetings(list("abcde"), (3, 2)) == [
        [MoshpitGroup(("a", "b")), MoshpitGroup(("c", "d", "e"))],
        [MoshpitGroup(("a", "c"), ("e",), 0, 2), MoshpitGroup(("b", "d"), (), 1, 2)],
    ]
    for peers, largest in ((0, 3), (5, 2)):
        with pytest.raises(ValueError, match="no grid"):
            grid_within(peers, largest)
    with pytest.raises(ValueError, match="no grid"):
        grid_of(3, 5)
