"""The grid: who meets whom, that d rounds give the exact mean, and what holes and failures leave of the variance."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.machine.moshpit import smallest_side
from peerd.sim.averaging_grid import (
    Cell,
    Grid,
    Line,
    Moshpit,
    grid_spread,
    random_spread,
    shape_of,
)

Pair = tuple[Fraction, Fraction]  # (w x, w)

swarms = st.tuples(st.integers(1, 70), st.integers(1, 5))


def names(count: int) -> list[str]:
    return [f"p{i:03}" for i in range(count)]


def begin(grid: Grid, rng: random.Random) -> tuple[dict[Cell, Pair], Fraction]:
    """A pair for every cell, and the weighted mean of the peers that they stand for."""
    given = {peer: (Fraction(rng.randint(-50, 50)), Fraction(rng.randint(1, 9))) for peer in grid.home}
    pairs = {cell: (Fraction(0), Fraction(0)) for cell in grid.player}
    pairs |= {grid.home[peer]: (x * w, w) for peer, (x, w) in given.items()}
    return pairs, sum((x * w for x, w in given.values()), Fraction()) / sum((w for _, w in given.values()), Fraction())


def average(pairs: dict[Cell, Pair], lines: list[Line]) -> None:
    for line in lines:
        count = len(line.cells)
        mean = tuple(sum((pairs[cell][k] for cell in line.cells), Fraction()) / count for k in (0, 1))
        pairs.update(dict.fromkeys(line.cells, (mean[0], mean[1])))


def values(pairs: dict[Cell, Pair]) -> dict[Cell, Fraction]:
    return {cell: s / w for cell, (s, w) in pairs.items()}


# --- the grid ------------------------------------------------------------------------------------------------------


@given(swarms)
def test_a_grid_has_a_cell_for_everyone_and_less_than_half_of_them_to_spare(swarm: tuple[int, int]) -> None:
    peers, axes = swarm
    shape = shape_of(peers, axes)
    assert peers <= math.prod(shape) < 2 * peers
    assert max(shape) <= smallest_side(peers, axes)
    assert len(shape) == axes or 2**axes > peers


def test_known_shapes() -> None:
    assert [shape_of(16, 2), shape_of(16, 1), shape_of(17, 3), shape_of(64, 3)] == [(4, 4), (16,), (3, 3, 2), (4, 4, 4)]
    assert [shape_of(1, 1), shape_of(3, 5), shape_of(5, 2)] == [(1,), (2, 2), (3, 2)]
    with pytest.raises(ValueError, match="no grid"):
        shape_of(0, 1)


@pytest.mark.slow
@given(swarms, st.binary(max_size=8), st.randoms())
def test_the_grid_depends_on_the_seed_and_the_peers_alone(
    swarm: tuple[int, int], seed: bytes, rng: random.Random
) -> None:
    peers, axes = swarm
    shuffled = names(peers)
    rng.shuffle(shuffled)
    one, other = Grid(seed, names(peers), shape_of(peers, axes)), Grid(seed, shuffled, shape_of(peers, axes))
    assert one.player == other.player
    assert list(one.home) == list(other.home)


@pytest.mark.slow
@given(swarms, st.binary(max_size=8))
def test_every_peer_has_one_cell_and_stand_ins_fill_the_rest(swarm: tuple[int, int], seed: bytes) -> None:
    peers, axes = swarm
    shape = shape_of(peers, axes)
    grid = Grid(seed, names(peers), shape)
    assert len(set(grid.home.values())) == peers
    assert set(grid.player) == set(itertools.product(*map(range, shape)))
    assert all(len(grid.cells_of(peer)) <= 2 for peer in grid.home)  # at most one more to play
    for axis in range(len(shape)):
        for line in grid.lines(axis, grid.home):
            assert len(set(line.peers)) == len(line.cells) == shape[axis]


@pytest.mark.slow
def test_stand_ins_can_fill_every_grid() -> None:
    for peers in range(1, 260):
        for axes in range(1, peers.bit_length() + 1):
            grid = Grid(b"any", names(peers), shape_of(peers, axes))
            assert len(grid.player) == math.prod(grid.shape), (peers, axes)
            assert max(map(len, grid.standing.values()), default=0) <= 1, (peers, axes)


def test_a_grid_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Grid(b"", names(5), (2, 2))


@pytest.mark.slow
@given(swarms, st.binary(max_size=4))
def test_two_who_met_do_not_meet_in_the_next_rounds(swarm: tuple[int, int], seed: bytes) -> None:
    peers, axes = swarm
    grid = Grid(seed, names(peers), shape_of(peers, axes), stand_ins=False)
    met = [
        {pair for line in grid.lines(axis, grid.home) for pair in itertools.combinations(sorted(line.peers), 2)}
        for axis in range(len(grid.shape))
    ]
    assert sum(map(len, met)) == len(set().union(*met))


# --- averaging -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(swarms, st.randoms())
def test_as_many_rounds_as_axes_give_the_exact_weighted_mean(swarm: tuple[int, int], rng: random.Random) -> None:
    peers, axes = swarm
    grid = Grid(b"seed", names(peers), shape_of(peers, axes))
    pairs, mean = begin(grid, rng)
    for axis in range(len(grid.shape)):
        average(pairs, grid.lines(axis, grid.home))
    assert set(values(pairs).values()) == {mean}


@pytest.mark.parametrize("axes", [2, 3])
def test_floating_point_sums_in_order_of_the_line_end_with_the_same_bits(axes: int) -> None:
    rng = random.Random(5)
    for peers in (4, 7, 16, 17, 27, 50):
        grid = Grid(b"seed", names(peers), shape_of(peers, axes))
        held = dict.fromkeys(grid.player, 0.0) | {cell: rng.gauss(0, 1) for cell in grid.home.values()}
        exact = math.fsum(held.values()) / len(held)
        for axis in range(len(grid.shape)):
            for line in grid.lines(axis, grid.home):
                total = 0.0
                for cell in line.cells:
                    total += held[cell]
                held.update(dict.fromkeys(line.cells, total / len(line.cells)))
        assert len(set(held.values())) == 1
        assert next(iter(held.values())) == pytest.approx(exact, abs=1e-15)


@pytest.mark.slow
@given(st.integers(2, 60), st.integers(2, 4), st.randoms())
def test_with_holes_the_mean_of_all_stays_what_it_was(peers: int, axes: int, rng: random.Random) -> None:
    grid = Grid(b"seed", names(peers), shape_of(peers, axes), stand_ins=False)
    pairs, mean = begin(grid, rng)
    for t in range(5):
        living = [peer for peer in grid.home if rng.random() < 0.7]
        average(pairs, grid.lines(t % len(grid.shape), living))
        assert sum(s for s, _ in pairs.values()) / sum(w for _, w in pairs.values()) == mean


@pytest.mark.parametrize("peers", [13, 14, 15])
def test_holes_bias_two_rounds_as_derived_and_further_rounds_heal_them(peers: int) -> None:
    """After rows and columns a cell has the mean of the means of those rows that have a cell in its column."""
    grid = Grid(b"seed", names(peers), (4, 4), stand_ins=False)
    pairs, mean = begin(grid, random.Random(peers))
    rows = {line.cells[0][0]: line.cells for line in grid.lines(1, grid.home)}
    row_means = {
        row: [sum((pairs[cell][k] for cell in cells), Fraction()) / len(cells) for k in (0, 1)]
        for row, cells in rows.items()
    }
    expected: dict[Cell, Fraction] = {}
    for cell in grid.player:
        counted = [row for row in rows if (row, cell[1]) in grid.player]
        sums = [sum((row_means[row][k] for row in counted), Fraction()) for k in (0, 1)]
        expected[cell] = sums[0] / sums[1]
    average(pairs, grid.lines(1, grid.home))
    average(pairs, grid.lines(0, grid.home))
    assert values(pairs) == expected
    error = max(abs(value - mean) for value in expected.values())
    assert error > 0
    rough = {cell: (Fraction(float(s)), Fraction(float(w))) for cell, (s, w) in pairs.items()}
    for t in range(40):
        average(rough, grid.lines(t % 2, grid.home))
        rough = {cell: (Fraction(float(s)), Fraction(float(w))) for cell, (s, w) in rough.items()}  # else they grow
    assert max(abs(value - mean) for value in values(rough).values()) < error * Fraction(1, 10**9)


def test_holes_do_no_harm_when_all_lines_of_an_axis_are_equally_long() -> None:
    grid = Grid(b"seed", names(16), (4, 4))
    living = [peer for peer, cell in grid.home.items() if cell[0] != 2]
    pairs, _ = begin(grid, random.Random(1))
    pairs = {cell: pair for cell, pair in pairs.items() if cell[0] != 2}
    mean = sum(s for s, _ in pairs.values()) / sum(w for _, w in pairs.values())
    for axis in (0, 1):
        average(pairs, grid.lines(axis, living))
    assert set(values(pairs).values()) == {mean}


# --- round after round ---------------------------------------------------------------------------------------------


def test_a_grid_lasts_while_the_members_are_the_same_and_changes_between_cycles_only() -> None:
    moshpit = Moshpit(b"seed")
    first = moshpit.advance(names(16), 2)
    assert (first.axis, first.fresh, len(first.lines)) == (0, True, 4)
    second = moshpit.advance(names(17)[1:], 2)  # one went, one came
    assert (second.axis, second.fresh) == (1, False)
    assert second.grid is first.grid
    assert {peer for line in second.lines for peer in line.peers} == set(names(16)[1:])
    third = moshpit.advance(names(17)[1:], 2)
    assert third.fresh
    assert third.grid is not first.grid
    assert set(third.grid.home) == set(names(17)[1:])
    moshpit.begin_anew()
    fourth = moshpit.advance(names(17)[1:], 2)
    assert (fourth.axis, fourth.fresh) == (0, True)
    assert fourth.grid is third.grid
    moshpit.begin_anew()
    fifth = moshpit.advance(names(17)[1:], 4)
    assert fifth.grid.shape == (2, 2, 2, 2)
    assert fifth.grid.player != Grid(b"seed", names(17)[1:], (2, 2, 2, 2)).player  # another seed for every grid


def test_one_peer_alone_meets_itself() -> None:
    moshpit = Moshpit(b"")
    assert [moshpit.advance(["a"], 1).lines for _ in range(2)] == [(Line(((0,),), ("a",)),)] * 2


# --- theory --------------------------------------------------------------------------------------------------------


def test_without_failures_the_theory_is_exact() -> None:
    assert random_spread([4] * 4, 0) == pytest.approx(3 / 15)
    assert random_spread([16], 0) == 0
    for shape in ((4, 4), (3, 2), (2, 2, 2), (5, 4, 3)):
        assert grid_spread(shape, 0, 0) == 1
        assert grid_spread(shape, 0, len(shape)) == pytest.approx(0, abs=1e-15)
    assert grid_spread((4, 4), 0, 1) == pytest.approx(3 / 15)


@pytest.mark.parametrize("failure", [0.01, 0.1, 0.5])
def test_one_round_of_a_grid_is_one_of_random_groups_and_two_are_better(failure: float) -> None:
    one = random_spread([4] * 4, failure)
    assert grid_spread((4, 4), failure, 1) == pytest.approx(one)
    assert grid_spread((4, 4), failure, 2) < one**2


def all_patterns(shape: Cell, failure: float, rounds: int) -> float:
    """By brute force over every pattern of failures: the mean of what each leaves of unit variance."""
    cells = list(itertools.product(*map(range, shape)))
    grid = Grid(b"", names(len(cells)), shape)
    total = 0.0
    for missing in itertools.product(itertools.product((False, True), repeat=len(cells)), repeat=rounds):
        count = sum(map(sum, missing))
        chance = failure**count * (1 - failure) ** (rounds * len(cells) - count)
        held = {cell: [float(cell == other) for other in cells] for cell in cells}  # rows of the matrix applied so far
        for t, gone in enumerate(missing):
            living = [grid.player[cell] for cell, out in zip(cells, gone, strict=True) if not out]
            for line in grid.lines(t % len(shape), living):
                mean = [
                    sum(column) / len(line.cells) for column in zip(*(held[cell] for cell in line.cells), strict=True)
                ]
                held.update(dict.fromkeys(line.cells, mean))
        left = sum(value * value for row in held.values() for value in row) - 1
        total += chance * left / (len(cells) - 1)
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "rounds"), [((2, 2), 1), ((2, 2), 2), ((2, 2), 3), ((3, 2), 2), ((2, 2, 2), 1)])
def test_the_formula_for_grids_equals_the_sum_over_all_failures(shape: Cell, rounds: int) -> None:
    assert grid_spread(shape, 0.3, rounds) == pytest.approx(all_patterns(shape, 0.3, rounds), rel=1e-9)
