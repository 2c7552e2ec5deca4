"""Hosts announce their experts, and take free ones only."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from peerd.experts.rules.claims import (
    ClaimingHost,
    announcements,
    candidates,
    capacity,
    in_own_order,
    last_prefixes,
    to_take,
)
from peerd.run.grid import Grid, Uid, coordinates_in

grids = st.builds(Grid, st.integers(1, 4), st.lists(st.integers(2, 9), min_size=1, max_size=3).map(tuple))


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
    records = announcements(grid, hosted, ClaimingHost(queue_s=-1.0, addrs=("/ip4/1.2.3.4/tcp/1",)))
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
