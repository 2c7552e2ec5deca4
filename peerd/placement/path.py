"""Open path: the order of stages with the least sum of edges between neighbours.

Exact by dynamic programming over subsets (Held and Karp) up to `EXACT_STAGES`, vectorised over all subsets of one size.
Above that, the best of greedy paths from every start, improved by reversing (2-opt) and moving (Or-opt) runs of stages.
Edges are symmetric and finite.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np
from numpy.typing import NDArray

from peerd.placement.problem import Matrix

EXACT_STAGES: Final = 14
GREEDY_STARTS: Final = 6  # number of best greedy paths that are improved
LONGEST_RUN: Final = 3  # most stages that Or-opt moves together

Index = NDArray[np.intp]


def open_path(edges: Matrix, near: list[int] | None = None) -> tuple[float, list[int]]:
    """Length of the shortest path through all stages, and the stages in its order. `edges` is [S, S].

    `near`: an order to improve instead of greedy ones, if the path is not exact; the result is never longer.
    """
    n = len(edges)
    if n <= 2:
        return (float(edges[0, 1]) if n == 2 else 0.0), list(range(n))
    if n <= EXACT_STAGES:
        return _exact(edges)
    return _improved(edges) if near is None else _descended(edges, near)


def length_of(edges: Matrix, order: list[int]) -> float:
    """Sum of the edges between neighbours."""
    return float(edges[order[:-1], order[1:]].sum())


def least_length(edges: Matrix) -> float:
    """Lower bound of the path's length: half of each stage's two shortest edges, with one edge each at the two ends."""
    n = len(edges)
    if n <= 2:
        return float(edges[0, 1]) if n == 2 else 0.0
    two = np.partition(edges + np.diag(np.full(n, np.inf)), 1, axis=1)[:, :2]
    second = two[:, 1].copy()
    second.partition(n - 2)
    return float(two.sum() - second[n - 2] - second[n - 1]) / 2


@functools.cache
def _layers(n: int) -> tuple[tuple[Index, Index, Index], ...]:
    """By size of the subset, 2 to n: subsets [L, 1], possible last stages [L, k], and subsets without these [L, k]."""
    layers = []
    for size in range(2, n + 1):
        subsets = [mask for mask in range(1 << n) if mask.bit_count() == size]
        last = np.array([[at for at in range(n) if mask >> at & 1] for mask in subsets], dtype=np.intp)
        masks = np.array(subsets, dtype=np.intp)[:, None]
        layers.append((masks, last, masks ^ (1 << last)))
    return tuple(layers)


def _exact(edges: Matrix) -> tuple[float, list[int]]:
    n = len(edges)
    best = np.full((1 << n, n), np.inf)  # shortest path over each subset, by last stage
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
    """A path that neither 2-opt nor Or-opt can shorten, with its length."""
    length = length_of(edges, order)
    while True:
        better = _reversed_run(edges, order) or _moved_run(edges, order)
        if better is None:
            return length, order
        found = length_of(edges, better)
        if not found < length:  # rounding
            return length, order
        length, order = found, better


@functools.cache
def _below(n: int) -> NDArray[np.bool_]:
    return np.tri(n, dtype=bool)


def _reversed_run(edges: Matrix, order: list[int]) -> list[int] | None:
    """The order after the best reversal of stages i to j, all pairs at once, or None; the path's ends are free."""
    n = len(order)
    along = edges[np.ix_(order, order)]
    gain = np.zeros((n, n))
    gain[1:] += np.diagonal(along, 1)[:, None]  # i - 1 to i
    gain[:, :-1] += np.diagonal(along, 1)  # j to j + 1
    gain[1:, :] -= along[:-1, :]  # i - 1 to j
    gain[:, :-1] -= along[:, 1:]  # i to j + 1
    gain[_below(n)] = 0.0
    i, j = divmod(int(gain.argmax()), n)
    if gain[i, j] <= 1e-12 * max(1.0, float(along.max())):
        return None
    return order[:i] + order[i : j + 1][::-1] + order[j + 1 :]


def _moved_run(edges: Matrix, order: list[int]) -> list[int] | None:
    """The order after the best move of a run of stages, in either direction, all runs of a length at once, or None."""
    n = len(order)
    ended = np.zeros((n + 2, n + 2))  # edges along the order, with free ends before and behind it
    ended[1:-1, 1:-1] = edges[np.ix_(order, order)]
    old = np.diagonal(ended, 1)  # edge at each place, 0 to n
    places = np.arange(n + 1)
    best, found = 1e-12 * max(1.0, float(ended.max())), None
    for run in range(1, LONGEST_RUN + 1):
        first = np.arange(1, n - run + 2)
        last = first + run - 1
        saved = ended[first - 1, first] + ended[last, last + 1] - ended[first - 1, last + 1]
        itself = (places >= first[:, None] - 1) & (places <= last[:, None])
        for head, tail in ((first, last), (last, first)):
            gain = saved[:, None] - (ended[head, :-1] + ended[tail, 1:] - old)
            gain[itself] = 0.0
            i, at = divmod(int(gain.argmax()), n + 1)
            if gain[i, at] > best:
                best, found = float(gain[i, at]), (i, run, at, head is last)
    if found is None:
        return None
    i, run, at, turned = found
    piece = order[i : i + run]
    rest = order[:i] + order[i + run :]
    at -= run if at > i else 0
    return rest[:at] + (piece[::-1] if turned else piece) + rest[at:]
