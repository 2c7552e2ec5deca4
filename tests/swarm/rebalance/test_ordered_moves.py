"""Moves that a conductor orders: what harms nobody, and what becomes of those under way."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from peerd.messages.swarm import Position
from peerd.swarm.rebalance.loads import Transfer
from peerd.swarm.rebalance.ordered_moves import AGAIN_S, MOST_S, OrderedMoves, PostView
from peerd.swarm.rebalance.rebalance_rule import RebalanceConfig

LATER_S = 10_000.0  # by then any lack has cost more than a move


def swarm(*counts: int, **changes: object) -> list[PostView]:
    """So many equal peers in each stage."""
    return [
        replace(PostView(f"{stage}-{n}", stage, True, 1.0), **changes)  # type: ignore[arg-type]
        for stage, count in enumerate(counts)
        for n in range(count)
    ]


def ordered(posts: list[PostView], own: str = "", moves: OrderedMoves | None = None, now: float = 0.0) -> set[Transfer]:
    """The moves that are ordered in the end, where nothing else changes."""
    found = moves or OrderedMoves(RebalanceConfig((1.0,) * (1 + max(p.stage for p in posts))), own)
    begun = found.look(now, posts)
    return {*begun, *found.look(now + LATER_S, posts)}


def change(posts: Iterable[PostView], peer: str, **changes: object) -> list[PostView]:
    return [replace(p, **changes) if p.peer == peer else p for p in posts]  # type: ignore[arg-type]


def test_one_of_the_strongest_stage_goes_to_the_weakest() -> None:
    (move,) = ordered(swarm(4, 1))
    assert (move.source, move.target) == (0, 1)


@pytest.mark.parametrize("why", ["conducts", "fixed", "not ready", "two posts"])
def test_a_peer_that_has_to_stay_stays(why: str) -> None:
    posts = swarm(3, 1)
    posts = [p for p in posts if p.peer != "0-2"]  # of two peers of stage 0, either could go
    assert len(ordered([*posts, PostView("x", 0, True, 1.0)])) == 1
    others = change(change(posts, "0-0", movable=False), "0-1", movable=False)
    x = PostView("x", 0, True, 1.0)
    if why == "fixed":
        x = replace(x, movable=False)
    if why == "not ready":
        x = replace(x, ready=False)
    more = [x, PostView("x", 1, True, 1.0)] if why == "two posts" else [x]
    assert ordered([*others, *more], own="x" if why == "conducts" else "") == set()


def test_a_stage_keeps_a_peer_that_has_the_current_state() -> None:
    posts = change(change(swarm(3, 1), "0-0", ready=False), "0-1", ready=False)
    assert ordered(posts) == set()  # the only one of stage 0 that is ready cannot go


def test_a_stage_keeps_a_checkpoint_to_which_all_could_return() -> None:
    old, new = Position(1, b"x"), Position(2, b"x")
    posts = [replace(p, saved=frozenset({old})) for p in swarm(3, 1)]
    some_have = [replace(p, saved=frozenset({old, new})) if p.peer in ("0-0", "1-0") else p for p in posts]
    (move,) = ordered(some_have)
    assert move.peer != "0-0"
    stuck = change(change(some_have, "0-1", movable=False), "0-2", movable=False)
    assert ordered(stuck) == set()


def test_a_peer_under_way_counts_where_it_goes_and_is_not_ordered_twice() -> None:
    moves = OrderedMoves(RebalanceConfig((1.0, 1.0)))
    posts = swarm(4, 1)
    (move,) = ordered(posts, moves=moves)
    assert moves.under_way == [move]
    assert moves.look(LATER_S + 1.0, posts) == []
    both = [*posts, PostView(move.peer, 1, False, 1.0)]
    assert moves.look(LATER_S + 2.0, both) == []
    there = change([p for p in both if (p.peer, p.stage) != (move.peer, 0)], move.peer, ready=True)
    assert moves.look(LATER_S + 3.0, there) == []
    assert (moves.under_way, moves.made) == ([], 1)


def test_a_peer_that_has_moved_stays_for_a_while() -> None:
    moves = OrderedMoves(RebalanceConfig((1.0, 1.0), price_s=0.001))
    posts = [*swarm(2, 1), PostView("x", 0, True, 1.0)]
    fixed = [replace(p, movable=p.peer == "x") for p in posts]
    (move,) = ordered(fixed, moves=moves)
    back = [replace(p, stage=1) if p.peer == "x" else p for p in fixed if p.peer != "0-1"]  # stage 0 has lost one
    more = [*back, PostView("1-1", 1, True, 1.0, movable=False)]
    assert moves.look(LATER_S + 1.0, more) == []
    assert moves.look(LATER_S + 2.0, more) == []
    assert move.target == 1
    rested_at = LATER_S + 2.0 + AGAIN_S
    assert [one.target for now in (0.0, 1.0) for one in moves.look(rested_at + now, more)] == [0]


@pytest.mark.parametrize("how", ["refuses", "does not go"])
def test_a_peer_that_does_not_go_is_left_alone_and_another_one_goes(how: str) -> None:
    moves = OrderedMoves(RebalanceConfig((1.0, 1.0)))
    posts = swarm(4, 1)
    (first,) = ordered(posts, moves=moves)
    now = LATER_S + 1.0
    if how == "refuses":
        moves.failed(now, first.peer)
    else:
        now += MOST_S
    found = [*moves.look(now, posts), *moves.look(now + 60.0, posts)]
    assert [one.target for one in found] == [1]
    assert found[0].peer != first.peer


@pytest.mark.slow
def test_whatever_is_seen_no_stage_loses_its_last_and_no_peer_goes_twice() -> None:
    rng = random.Random("moves")
    for _ in range(200):
        stages = rng.randrange(2, 5)
        moves = OrderedMoves(RebalanceConfig((1.0,) * stages, price_s=rng.choice([0.1, 20.0])), own="p0")
        posts = [PostView(f"p{i}", rng.randrange(stages), True, rng.choice([0.0, 1.0, 4.0])) for i in range(12)]
        now = 0.0
        for _ in range(40):
            now += rng.expovariate(1 / 100.0)
            posts = [replace(p, ready=rng.random() < 0.9, movable=rng.random() < 0.9) for p in posts]
            begun = moves.look(now, posts)
            assert len({one.peer for one in begun}) == len(begun)
            gone = {one.peer for one in moves.under_way}
            for one in begun:
                assert one.peer != "p0"
                assert any(p.stage == one.source and p.ready and p.peer not in gone for p in posts)
            for one in moves.under_way:
                if rng.random() < 0.5:
                    posts = [replace(p, stage=one.target) if p.peer == one.peer else p for p in posts]
