"""Beam search: finds the best experts that live, skips the dead, asks for nothing twice; no liar hides others."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from peerd.core.errors import LocalError
from peerd.experts.rules.product_key_beam import BeamSearch
from peerd.run.grid import Grid, Uid, bitmap

GRIDS = [(7,), (16,), (4, 5), (16, 16), (3, 4, 5), (6, 2, 9)]


class Live:
    """The experts that live, and what a directory would say of prefixes; `claimed`: bits with nothing below them."""

    def __init__(self, grid: Grid, experts: set[Uid], claimed: set[Uid] | None = None) -> None:
        self.grid, self.experts = grid, experts
        self.asked: list[Uid] = []
        self.rounds = 0
        self._bits: dict[Uid, set[int]] = {}
        for uid in experts | (claimed or set()):
            while uid.at:
                self._bits.setdefault(uid.prefix, set()).add(uid.at[-1])
                uid = uid.prefix

    def look_up(self, prefixes: list[Uid]) -> dict[Uid, bytes]:
        self.rounds += 1
        self.asked += prefixes
        return {p: bitmap(self._bits.get(p, ()), self.grid.side_below(p)) if p in self._bits else b"" for p in prefixes}


def searched(search: BeamSearch, live: Live) -> list[list[Uid]]:
    asked = search.step({})
    while asked:
        asked = search.step(live.look_up(asked))
        search.check()
    assert len(live.asked) == len(set(live.asked)) == search.lookups
    return search.result()


def scores_of(grid: Grid, samples: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((samples, side), dtype=np.float32) for side in grid.sides]


def score(scores: list[np.ndarray], sample: int, uid: Uid) -> float:
    total = np.float32(0)
    for part, coordinate in zip(scores, uid.at, strict=True):
        total = total + part[sample, coordinate]
    return float(total)


def all_experts(grid: Grid, layer: int = 0) -> list[Uid]:
    return [Uid(layer, at) for at in itertools.product(*map(range, grid.sides))]


@pytest.mark.parametrize("sides", GRIDS)
def test_in_a_full_grid_the_best_experts_of_all_are_found(sides: tuple[int, ...]) -> None:
    grid = Grid(2, sides)
    live, scores = Live(grid, set(all_experts(grid, 1))), scores_of(grid, 5, seed=1)
    found = searched(BeamSearch(grid, 1, scores, 4), live)
    for sample, uids in enumerate(found):
        best = sorted(live.experts, key=lambda uid: -score(scores, sample, uid))[:4]
        assert uids == best


@pytest.mark.parametrize("seed", range(60))
def test_whatever_lives_as_many_as_there_are_come_back_best_first(seed: int) -> None:
    rng = random.Random(seed)
    grid = Grid(1, rng.choice(GRIDS))
    experts = {uid for uid in all_experts(grid) if rng.random() < rng.choice([0.02, 0.2, 0.7])}
    ghosts = {uid.prefix for uid in all_experts(grid) if rng.random() < 0.2 and len(uid.at) == 3}
    live, scores, k = Live(grid, experts, ghosts), scores_of(grid, 6, seed), rng.randint(1, 6)
    found = searched(BeamSearch(grid, 0, scores, k, rng.random()), live)
    for sample, uids in enumerate(found):
        assert len(set(uids)) == len(uids) == min(k, len(experts)), f"seed {seed}"
        assert set(uids) <= experts
        ranks = [score(scores, sample, uid) for uid in uids]
        assert ranks == sorted(ranks, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_prefixes_are_walked_by_rank_until_k_live_ones_are_found(seed: int) -> None:
    rng, grid, k = random.Random(seed), Grid(1, (12, 8)), 3
    experts = {uid for uid in all_experts(grid) if rng.random() < 0.4 and uid.at[0] % 2}
    live, scores = Live(grid, experts), scores_of(grid, 1, seed)
    (found,) = searched(BeamSearch(grid, 0, scores, k), live)
    first = sorted({uid.at[0] for uid in experts}, key=lambda c: -scores[0][0, c])[:k]
    below = sorted((u for u in experts if u.at[0] in first), key=lambda uid: -score(scores, 0, uid))
    assert found == below[:k]
    worst = min(scores[0][0, c] for c in first)
    needed = {Uid(0, (c,)) for c in range(12) if scores[0][0, c] >= worst}
    assert needed <= set(live.asked)


def test_one_round_is_enough_where_all_lives_and_few_where_little_does() -> None:
    grid = Grid(1, (256, 256))
    full = Live(grid, set(all_experts(grid)))
    searched(BeamSearch(grid, 0, scores_of(grid, 64, 1), 4), full)
    assert full.rounds == 1
    sparse = Live(grid, {uid for uid in all_experts(grid) if uid.at[0] % 5 == 0 and uid.at[1] % 3 == 0})
    search = BeamSearch(grid, 0, scores_of(grid, 1, 1), 4)
    searched(search, sparse)
    assert sparse.rounds <= 6
    assert search.live_share < 0.5
    again = Live(grid, sparse.experts)
    searched(BeamSearch(grid, 0, scores_of(grid, 1, 1), 4, search.live_share), again)
    assert again.rounds < sparse.rounds


def test_prefixes_that_a_liar_announces_hide_no_experts_behind_them() -> None:
    grid = Grid(1, (8, 8, 4))
    honest = {Uid(0, (7, c, 0)) for c in range(8)}
    ghosts = {Uid(0, (a, b)) for a in range(7) for b in range(8)}
    scores = [np.tile(np.linspace(10, 0, side, dtype=np.float32), (3, 1)) for side in grid.sides]
    live = Live(grid, honest, ghosts)
    found = searched(BeamSearch(grid, 0, scores, 4), live)
    assert found == [[Uid(0, (7, c, 0)) for c in range(4)]] * 3


def test_nothing_alive_is_an_empty_answer_after_asking_once() -> None:
    grid = Grid(1, (9, 9))
    live = Live(grid, set())
    assert searched(BeamSearch(grid, 0, scores_of(grid, 2, 3), 4), live) == [[], []]
    assert len(live.asked) == 9
    assert searched(BeamSearch(grid, 0, scores_of(grid, 0, 3), 4), Live(grid, set())) == []


def test_bits_beyond_the_side_are_no_experts() -> None:
    grid = Grid(1, (3,))
    search = BeamSearch(grid, 0, scores_of(grid, 1, 1), 8)
    assert search.step({}) == [Uid(0, ())]
    assert search.step({Uid(0, ()): b"\xff"}) == []
    assert sorted(search.result()[0]) == [Uid(0, (c,)) for c in range(3)]


@pytest.mark.parametrize("bad", ["shape", "nan", "layer", "k"])
def test_scores_that_cannot_be_searched_are_our_own_fault(bad: str) -> None:
    grid = Grid(1, (4, 4))
    scores = scores_of(grid, 2, 1)
    if bad == "nan":
        scores[1][0, 0] = math.nan
    if bad == "shape":
        scores = scores[:1]
    with pytest.raises(LocalError):
        BeamSearch(grid, 3 if bad == "layer" else 0, scores, 0 if bad == "k" else 2)
    with pytest.raises(LocalError, match="not a prefix"):
        BeamSearch(grid, 0, scores_of(grid, 2, 1), 2).step({Uid(0, (1, 1)): b""})
