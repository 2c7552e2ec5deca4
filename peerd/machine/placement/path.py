"""Open path: the order of stages in which the sum of the edges between neighbours is least.

Exact by dynamic programming over subsets (Held and Karp) up to `EXACT_STAGES`, vectorised over all subsets of one size;
above, the best of greedy paths from every start, improved by reversing (2-opt) and moving (Or-opt) runs of stages.
Edges are the same in both directions, and finite.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from peerd.machine.placement.problem import Matrix

EXACT_STAGES: Final = 14
GREEDY_STARTS: Final = 6  # of which the best paths are improved
LONGEST_RUN: Final = 3  # stages that Or-opt moves together

Index = NDArray[np.intp]


def open_path(edges: Matrix) -> tuple[float, list[int]]:
    """Length of the shortest path through all stages, and the stages in its order, [S, S]."""
    n = len(edges)
    if n <= 2:
        return (float(edges[0, 1]) if n == 2 else 0.0), list(range(n))
    return _exact(edges) if n <= EXACT_STAGES else _improved(edges)


def length_of(edges: Matrix, order: list[int]) -> float:
    """Sum of the edges between neighbours."""
    return float(edges[order[:-1], order[1:]].sum())


def least_length(edges: Matrix) -> float:
    """A bound from below: inner stages have two edges, so count the two best of each, half each, but for both ends."""
    n = len(edges)
    if n <= 2:
        return float(edges[0, 1]) if n == 2 else 0.0
    two = np.partition(edges + np.diag(np.full(n, np.inf)), 1, axis=1)[:, :2]
    second = two[:, 1].copy()
    second.partition(n - 2)
    return float(two.sum() - second[n - 2] - second[n - 1]) / 2


@functools.cache
def _layers(n: int) -> tuple[tuple[Index, Index, Index], ...]:
    """By size of the subset, 2 to n: subsets [L, 1], each one's last stages [L, k], and the subsets before [L, k]."""
    layers = []
    for size in range(2, n + 1):
        subsets = [mask for mask in range(1 << n) if mask.bit_count() == size]
        last = np.array([[at for at in range(n) if mask >> at & 1] for mask in subsets], dtype=np.intp)
        masks = np.array(subsets, dtype=np.intp)[:, None]
        layers.append((masks, last, masks ^ (1 << last)))
    return tuple(layers)


def _exact(edges: Matrix) -> tuple[float, list[int]]:
    n = len(edges)
    best = np.full((1 << n, n), np.inf)  # shortest path over a subset that ends in a stage
    best[1 << np.arange(n), np.arange(n)] = 0.0
    for masks, last, before in _layers(n):
        best[masks, last] = (best[before] + edges[last]).min(axis=2)
    mask = (1 << n) - 1
    at = int(best[mask].argmin())
    length, order = float(best[mask, at]), [at]
    while mask := mask ^ (1 << at):
        at = int((best[mask] + edges[at]).argmin())
        order.append(at)
    return length, order


def _improved(edges: Matrix) -> tuple[float, list[int]]:
    greedy = sorted((_greedy(edges, start) for start in range(len(edges))), key=lambda path: length_of(edges, path))
    found = [_descended(edges, order) for order in greedy[:GREEDY_STARTS]]
    return min(found, key=lambda path: path[0])


def _greedy(edges: Matrix, start: int) -> list[int]:
    order, left = [start], [at for at in range(len(edges)) if at != start]
    while left:
        nearest = left[int(edges[order[-1], left].argmin())]
        order.append(nearest)
        left.remove(nearest)
    return order


def _descended(edges: Matrix, order: list[int]) -> tuple[float, list[int]]:
    """A path that neither 2-opt nor Or-opt makes shorter."""
    length = length_of(edges, order)
    while True:
        better = _reversed_run(edges, order) or _moved_run(edges, order)
        if better is None:
            return length, order
        found = length_of(edges, better)
        if not found < length:  # rounding
            return length, order
        length, order = found, better


def _reversed_run(edges: Matrix, order: list[int]) -> list[int] | None:
    """The best reversal of stages i to j, all pairs at once; the path's ends are free."""
    n = len(order)
    along = edges[np.ix_(order, order)]
    before = np.append(0.0, np.diagonal(along, 1))  # edge into each place
    after = np.append(np.diagonal(along, 1), 0.0)
    gain = before[:, None] + after[None, :]
    gain[1:, :] -= along[:-1, :]  # i - 1 to j
    gain[:, :-1] -= along[:, 1:]  # i to j + 1
    gain[np.tril_indices(n)] = 0.0
    i, j = divmod(int(gain.argmax()), n)
    if gain[i, j] <= 1e-12 * max(1.0, float(along.max())):
        return None
    return order[:i] + order[i : j + 1][::-1] + order[j + 1 :]


def _moved_run(edges: Matrix, order: list[int]) -> list[int] | None:
    n = len(order)
    for run in range(1, LONGEST_RUN + 1):
        for i in range(n - run + 1):
            piece, rest = order[i : i + run], order[:i] + order[i + run :]
            gone = (edges[order[i - 1], piece[0]] if i else 0.0) + (
                edges[piece[-1], order[i + run]] if i + run < n else 0.0
            )
            joined = edges[order[i - 1], order[i + run]] if i and i + run < n else 0.0
            old = np.append(np.append(0.0, edges[rest[:-1], rest[1:]]), 0.0)
            for turned in (piece, piece[::-1]):
                added = np.append(0.0, edges[rest, turned[0]]) + np.append(edges[turned[-1], rest], 0.0) - old
                at = int(added.argmin())
                if gone - joined - added[at] > 1e-12 * max(1.0, float(gone)):
                    return rest[:at] + turned + rest[at:]
    return None
