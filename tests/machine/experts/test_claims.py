"""Everyone sees the same owner of an expert, whatever the order in which claims come, and hosts take free ones only."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from peerd.core.experts.grid import Grid, Uid, coordinates_in
from peerd.machine.experts.claims import (
    ExpertClaim,
    HostWords,
    announcements,
    candidates,
    capacity,
    in_own_order,
    last_prefixes,
    outbid,
    to_take,
    winners,
)

X, Y = Uid(0, (1, 2)), Uid(0, (1, 3))
claims_strategy = st.lists(
    st.tuples(st.sampled_from([X, Y]), st.builds(ExpertClaim, st.integers(0, 3), st.sampled_from("abcd"))), max_size=12
)
grids = st.builds(Grid, st.integers(1, 4), st.lists(st.integers(2, 9), min_size=1, max_size=3).map(tuple))


def test_the_highest_generation_wins_and_then_the_highest_peer() -> None:
    told = [(X, ExpertClaim(0, "z")), (X, ExpertClaim(1, "a")), (X, ExpertClaim(1, "b")), (Y, ExpertClaim(0, "a"))]
    assert winners(told) == {X: ExpertClaim(1, "b"), Y: ExpertClaim(0, "a")}


@given(claims_strategy, st.randoms(use_true_random=False))
def test_the_order_in_which_claims_come_decides_nothing(
    told: list[tuple[Uid, ExpertClaim]], rng: random.Random
) -> None:
    shuffled = list(told)
    rng.shuffle(shuffled)
    assert winners(shuffled) == winners(told)


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 2), min_size=1))
def test_of_all_hosts_of_one_expert_exactly_one_keeps_it(generations: dict[str, int]) -> None:
    seen = winners((X, ExpertClaim(generation, peer)) for peer, generation in generations.items())
    keep = [peer for peer, generation in generations.items() if not outbid({X: generation}, peer, seen)]
    assert keep == [seen[X].peer]


def test_a_host_keeps_what_its_own_old_announcement_names() -> None:
    assert outbid({X: 0}, "a", {X: ExpertClaim(5, "a")}) == {}
    assert outbid({X: 1}, "a", {X: ExpertClaim(1, "b"), Y: ExpertClaim(9, "b")}) == {X: ExpertClaim(1, "b")}


@given(grids, st.integers(0, 1000))
def test_a_hosts_own_order_holds_each_expert_once(grid: Grid, seed: int) -> None:
    found = list(in_own_order(grid, random.Random(seed)))
    assert len(found) == len(set(found)) == grid.layers * grid.places
    assert all(grid.is_expert(uid) for uid in found)


def test_hosts_take_different_experts() -> None:
    grid = Grid(1, (16, 16))
    firsts = {tuple(candidates(grid, random.Random(seed), 4)[:4]) for seed in range(20)}
    assert len(firsts) == 20
    assert len(candidates(Grid(1, (1024, 1024)), random.Random(1), 10**9)) == 100_000


@given(grids, st.integers(0, 30), st.integers(0, 1000))
def test_only_free_experts_are_taken_and_as_many_as_there_is_room_for(grid: Grid, room: int, seed: int) -> None:
    looked_at = candidates(grid, random.Random(seed), room)
    taken = looked_at[::2]
    found = to_take(looked_at, taken, room)
    assert not set(found) & set(taken)
    assert len(found) == min(room, len(looked_at) - len(taken))


def test_capacity_is_the_users_limit_or_what_was_measured_and_never_more_than_the_grid() -> None:
    grid = Grid(2, (4,))
    assert [capacity(3, 100, grid), capacity(0, 5, grid), capacity(0, -1, grid), capacity(50, 0, grid)] == [3, 5, 0, 8]


@given(grids, st.integers(0, 1000), st.integers(1, 20))
def test_announcements_name_every_expert_once_below_each_of_its_prefixes(grid: Grid, seed: int, count: int) -> None:
    uids = candidates(grid, random.Random(seed), count)[:count]
    hosted = {uid: (number, 10 * number) for number, uid in enumerate(uids)}
    records = announcements(grid, hosted, HostWords(queue_s=-1.0, addrs=("/ip4/1.2.3.4/tcp/1",)))
    found = dict[Uid, tuple[int, int]]()
    for record in records:
        prefix, below = record.prefix.uid, coordinates_in(record.below)
        assert len(record.below) == -(-grid.side_below(prefix) // 8)
        if len(prefix.at) < len(grid.sides) - 1:
            assert record.generations == record.versions == []
            assert {uid.at[len(prefix.at)] for uid in uids if uid.at[: len(prefix.at)] == prefix.at} >= set(below)
        else:
            for coordinate, pair in zip(below, zip(record.generations, record.versions, strict=True), strict=True):
                assert prefix.below(coordinate) not in found
                found[prefix.below(coordinate)] = pair
    assert found == hosted
    assert [r.prefix.uid for r in records if len(r.prefix.at) == len(grid.sides) - 1] == last_prefixes(uids)
    assert all(record.queue_s == 0.0 for record in records)
