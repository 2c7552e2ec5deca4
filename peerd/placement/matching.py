"""Bottleneck matching: serve every peer such that the slowest link used is as fast as possible.

Rows and columns are the peers of two neighbouring stages. If both have the same number of peers of one speed, it is a
perfect matching; otherwise it is a flow, in which each peer carries its share of the microbatches. The threshold starts
at the lower bound of `least_value`, and rises only if Hall's condition fails below it: to the least cost that leads out
of the failing set. So no threshold is tried in vain, and the matching found so far is kept. Sets of columns are bits of
an int.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peerd.placement.problem import Matrix


@dataclass(frozen=True, slots=True)
class Matching:
    """The slowest link used, and the pairs (row, column) with the flow between them."""

    value: float
    flows: tuple[tuple[int, int, int], ...]  # row, column, units

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple((row, column) for row, column, _ in self.flows)


def bottleneck(costs: Matrix, supply: Sequence[int] | None = None, demand: Sequence[int] | None = None) -> Matching:
    """The best way to serve each row and column: with one partner each, or by shares `supply` and `demand` of equal
    sums.

    Costs must be finite. Units are integers, so that no rounding remains. Raises ValueError if the sizes or sums
    differ.
    """
    if supply is None or demand is None:
        if costs.shape[0] != costs.shape[1]:
            raise ValueError(f"a perfect matching of {costs.shape[0]} rows and {costs.shape[1]} columns")
        value, partner = perfect(costs)
        return Matching(value, tuple((row, column, 1) for row, column in enumerate(partner)))
    if sum(supply) != sum(demand):
        raise ValueError(f"{sum(supply)} units to send, {sum(demand)} to receive")
    return _Spread(costs, supply, demand).run()


def least_value(costs: Matrix) -> float:
    """A lower bound: the best link of the peer whose best link is the slowest."""
    return float(max(costs.min(axis=1).max(), costs.min(axis=0).max()))


def perfect(costs: Matrix) -> tuple[float, list[int]]:
    """Bottleneck and the column of each row, [n, n]."""
    value = least_value(costs)
    n = len(costs)
    rows = _sets(costs, value)
    column_of, row_of, free = [-1] * n, [-1] * n, (1 << n) - 1
    came_from: dict[int, int] = {}
    for row in range(n):
        while True:
            open_ = rows[row] & free
            if open_:
                column, end = (open_ & -open_).bit_length() - 1, row
            else:
                column, end, came_from, seen, reached = _alternate(rows, row, row_of, free)
                if column < 0:
                    outside = [c for c in range(n) if not seen >> c & 1]
                    value = float(costs[np.ix_(reached, outside)].min())
                    rows = _sets(costs, value)
                    continue
            break
        free &= ~(1 << column)
        while True:  # flip the path, from its end
            before = column_of[end]
            column_of[end], row_of[column] = column, end
            if end == row:
                break
            column, end = before, came_from[before]
    return value, column_of


def _alternate(
    rows: list[int], start: int, row_of: list[int], free: int
) -> tuple[int, int, dict[int, int], int, list[int]]:
    """Search a free column along an alternating path from `start`, none of whose columns is free.

    Returns the free column (-1 if there is none), the row before it, the path back (column -> row), the columns seen,
    and the rows reached.
    """
    came_from: dict[int, int] = {}  # column -> row that reached it
    seen, queue = 0, [start]
    for row in queue:
        fresh = rows[row] & ~seen
        if fresh & free:
            open_ = fresh & free
            return (open_ & -open_).bit_length() - 1, row, came_from, seen, queue
        seen |= fresh
        while fresh:
            bit = fresh & -fresh
            column = bit.bit_length() - 1
            came_from[column] = row
            queue.append(row_of[column])
            fresh ^= bit
    return -1, -1, came_from, seen, queue


def _sets(costs: Matrix, value: float) -> list[int]:
    """The columns that each row may use at a threshold, as bits."""
    packed = np.packbits(costs <= value, axis=1, bitorder="little")
    if packed.shape[1] == 1:
        found: list[int] = packed[:, 0].tolist()
        return found
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


class _Spread:
    """Flow of integer units from rows to columns under a rising threshold."""

    def __init__(self, costs: Matrix, supply: Sequence[int], demand: Sequence[int]) -> None:
        self._costs = costs
        self._value = least_value(costs)
        self._rows = _sets(costs, self._value)
        self._supply, self._demand = list(supply), list(demand)
        self._flow: list[dict[int, int]] = [{} for _ in demand]  # of each column: row -> units
        self._open = sum(1 << column for column, units in enumerate(demand) if units)

    def run(self) -> Matching:
        for row in range(len(self._supply)):
            while self._supply[row]:
                self._send(row)
        flows = sorted((row, column, units) for column, of in enumerate(self._flow) for row, units in of.items())
        return Matching(self._value, tuple(flows))

    def _send(self, start: int) -> None:
        """Send more units of one row along a shortest path with room, or raise the threshold."""
        column_before: dict[int, int] = {}  # row -> the column that returns its flow
        row_before: dict[int, int] = {}
        seen, queue, queued = 0, [start], {start}
        for row in queue:
            fresh = self._rows[row] & ~seen
            open_ = fresh & self._open
            if open_:
                column = (open_ & -open_).bit_length() - 1
                row_before[column] = row
                self._turn(start, column, row_before, column_before)
                return
            seen |= fresh
            while fresh:
                bit = fresh & -fresh
                column = bit.bit_length() - 1
                row_before[column] = row
                for other in self._flow[column]:
                    if other not in queued:
                        queued.add(other)
                        column_before[other] = column
                        queue.append(other)
                fresh ^= bit
        outside = [c for c in range(len(self._demand)) if not seen >> c & 1]
        self._value = float(self._costs[np.ix_(queue, outside)].min())
        self._rows = _sets(self._costs, self._value)

    def _turn(self, start: int, column: int, row_before: dict[int, int], column_before: dict[int, int]) -> None:
        path = [(row_before[column], column)]  # from the end: (row, column it sends to)
        while path[-1][0] != start:
            given_back = column_before[path[-1][0]]
            path.append((row_before[given_back], given_back))
        units = min(self._supply[start], self._demand[column])
        for (row, _), (_, given_back) in itertools.pairwise(path):
            units = min(units, self._flow[given_back][row])
        self._supply[start] -= units
        self._demand[column] -= units
        if not self._demand[column]:
            self._open &= ~(1 << column)
        for row, to in path:
            self._flow[to][row] = self._flow[to].get(row, 0) + units
        for (row, _), (_, given_back) in itertools.pairwise(path):
            self._flow[given_back][row] -= units
            if not self._flow[given_back][row]:
                del self._flow[given_back][row]
