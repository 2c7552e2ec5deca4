"""Bottleneck matchings and open paths against all there are."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest

from peerd.placement.matching import bottleneck
from peerd.placement.path import EXACT_STAGES, _improved, least_length, length_of, open_path
from peerd.placement.problem import Matrix
from tests.worlds.machines.placements import drawn_costs, least_bottleneck


def drawn_edges(rng: Random, stages: int) -> Matrix:
    edges = np.array([[rng.uniform(1, 10) for _ in range(stages)] for _ in range(stages)])
    return (edges + edges.T) / 2


@pytest.mark.parametrize("seed", range(10))
def test_a_perfect_matching_has_the_least_slowest_pair_of_all(seed: int) -> None:
    rng = Random(seed)
    for size in (1, 2, 3, 4, 5, 6):
        costs = drawn_costs(rng, size, size)
        found = bottleneck(costs)
        every = itertools.permutations(range(size))
        assert found.value == min(max(costs[row, to[row]] for row in range(size)) for to in every)
        assert [row for row, _ in found.pairs] == sorted(column for _, column in found.pairs) == list(range(size))
        assert max(costs[row, column] for row, column in found.pairs) == found.value


def test_a_large_matching_is_as_good_as_its_certificate() -> None:
    """More columns than one byte of bits holds; no cheaper threshold leaves each set of rows enough columns."""
    rng = np.random.default_rng(5)
    costs = rng.random((70, 70))
    found = bottleneck(costs)
    assert sorted(column for _, column in found.pairs) == list(range(70))
    assert max(costs[row, column] for row, column in found.pairs) == found.value
    below = np.where(costs < found.value, 0.0, 1.0)
    assert bottleneck(below).value == 1.0


@pytest.mark.parametrize("seed", range(10))
def test_shares_flow_over_the_least_slowest_pair_and_arrive_in_full(seed: int) -> None:
    rng = Random(seed)
    for _ in range(10):
        rows, columns = rng.randint(1, 4), rng.randint(1, 4)
        supply = [rng.randint(1, 9) for _ in range(rows)]
        cuts = sorted(rng.sample(range(1, sum(supply) + columns), columns - 1))
        whole = [end - begin for begin, end in itertools.pairwise([0, *cuts, sum(supply) + columns])]
        demand = [units - 1 for units in whole]  # some may want nothing
        costs = drawn_costs(rng, rows, columns)
        wanting = [column for column in range(columns) if demand[column]]
        found = bottleneck(costs[:, wanting], supply, [demand[column] for column in wanting])
        asked = np.array([demand[column] for column in wanting], dtype=float)
        assert found.value == least_bottleneck(costs[:, wanting], np.array(supply, dtype=float), asked)
        sent = np.zeros((rows, len(wanting)))
        for row, column, units in found.flows:
            assert units > 0
            sent[row, column] += units
        assert sent.sum(1).tolist() == supply
        assert sent.sum(0).tolist() == asked.tolist()


def test_shares_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ValueError, match="3 units to send, 4 to receive"):
        bottleneck(np.zeros((1, 2)), [3], [2, 2])
    with pytest.raises(ValueError, match="1 rows and 2 columns"):
        bottleneck(np.zeros((1, 2)))


@pytest.mark.parametrize("stages", range(1, 8))
def test_a_path_is_the_shortest_of_all(stages: int) -> None:
    rng = Random(stages)
    for _ in range(5):
        edges = drawn_edges(rng, stages)
        length, order = open_path(edges)
        shortest = min(length_of(edges, list(path)) for path in itertools.permutations(range(stages)))
        assert length == pytest.approx(shortest)
        assert sorted(order) == list(range(stages))
        assert length_of(edges, order) == pytest.approx(length)
        assert least_length(edges) <= length + 1e-12


def test_a_path_too_long_to_be_exact_is_nearly_so() -> None:
    rng, over = Random(1), []
    for _ in range(10):
        edges = drawn_edges(rng, 9)
        found, exact = _improved(edges), open_path(edges)
        assert sorted(found[1]) == list(range(9))
        assert length_of(edges, found[1]) == pytest.approx(found[0])
        over.append(found[0] / exact[0])
    assert min(over) >= 1 - 1e-12
    assert sum(over) / len(over) < 1.02


def test_a_long_path_along_a_line_is_found_and_an_order_is_never_made_worse() -> None:
    count = EXACT_STAGES + 6
    at = np.array(Random(2).sample(range(1000), count), dtype=float)
    edges = abs(at[:, None] - at[None])
    assert open_path(edges)[0] == at.max() - at.min()
    drawn = list(range(count))
    assert open_path(edges, drawn)[0] <= length_of(edges, drawn)
