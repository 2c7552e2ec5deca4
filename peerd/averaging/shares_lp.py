"""Shares by bandwidth if the path between some pairs of peers is narrower than their own lines: a linear programme.

Adds one constraint per limited pair to those of the closed form (`shares`): i sends j its version of j's share and the
sum of its own share, w_j + w_i if both are senders. It minimises the round's time over the shares. Among all shares
that reach the minimum, it returns those whose relative loads are lexicographically least: a unique answer, equal to the
closed form's if no pair binds. HiGHS solves it to a few millionths; the peer that solves it sends the others the
result.

A limit of 0 means that the pair cannot exchange data. If no owner is reachable by all senders, one exact round is
impossible (NoSplit); what remains is gossip: an average within each group that can, and other groups in the next round.
Takes milliseconds to seconds and imports scipy, so call it on a worker. Limits are measurements: a wrong one costs
time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peerd.averaging.shares import (
    MemberLine,
    Mode,
    NoSplit,
    Shares,
    bound_s_per_byte,
    load,
    proportional,
    shares,
    widths,
)

Pairs = Mapping[tuple[str, str], float]  # (from, to): bytes/s between the two, in this direction

_SLACK = 1e-7  # relative allowance for the solver's tolerance
_DUAL = 1e-9  # a multiplier above this counts as nonzero


def shares_within(lines: Sequence[MemberLine], pairs: Pairs) -> Shares:
    """The best division of the work if `pairs` are limited as well; equal to the closed form's if they do not bind.

    If no line is known, all count as wide as the widest pair. Raises like `shares`; NoSplit also if some sender reaches
    no peer that could sum for all, and ValueError also for invalid limits.
    """
    if not all(math.isfinite(rate) and rate >= 0 for rate in pairs.values()):
        raise ValueError("a pair's limit must be a finite number of bytes/s, not below 0")
    widest = max(pairs.values(), default=0.0)
    if widest > 0 and all(line.up_bytes_per_s is None and line.down_bytes_per_s is None for line in lines):
        lines = [replace(line, up_bytes_per_s=widest) for line in lines]
    free = shares(lines)
    own = bound_s_per_byte(lines, free.fractions) * (1 + _SLACK)
    if pair_bound_s_per_byte(lines, pairs, free.fractions) <= max(free.xi_s_per_byte, own):
        return free
    return solved(lines, pairs)


def pair_bound_s_per_byte(lines: Sequence[MemberLine], pairs: Pairs, fractions: Mapping[str, float]) -> float:
    """The time of the slowest limited pair in seconds per byte of the vector; infinity if a blocked pair has data."""
    sends = {line.peer: line.sends for line in lines}
    worst = 0.0
    for (source, target), rate in pairs.items():
        if source in sends and target in sends and source != target:
            amount = sends[source] * fractions[target] + sends[target] * fractions[source]
            if amount > 0:
                worst = max(worst, amount / rate if rate > 0 else math.inf)
    return worst


@dataclass(frozen=True, slots=True)
class _Programme:
    """The constraints as rows of a x <= b over x = (shares in the order of `peers`, seconds per byte)."""

    peers: list[str]
    rows: list[dict[int, float]]  # column: coefficient
    right: list[float]
    top: list[float]  # the largest share of each peer


def solved(lines: Sequence[MemberLine], pairs: Pairs) -> Shares:
    """Like `shares_within`, but always uses the solver."""
    rates = widths(lines)
    largest = max(rates.values(), default=0.0)
    if largest <= 0 or not any(line.sends for line in lines):
        return shares(lines)  # raises the specific error
    ordered = sorted(lines, key=lambda line: line.peer)
    # Rates in units of the widest line, because the solver's tolerances are absolute.
    programme = _programme(
        ordered,
        {peer: rate / largest for peer, rate in rates.items()},
        {pair: rate / largest for pair, rate in sorted(pairs.items())},
    )
    xi = _least_time(programme)
    weights = _evenest(programme, ordered, rates, xi)
    why = "the paths between pairs of peers limit the round"
    return Shares(proportional(dict(zip(programme.peers, weights, strict=True))), xi / largest, why)


def _programme(lines: Sequence[MemberLine], rates: Mapping[str, float], pairs: Pairs) -> _Programme:
    senders, xi = sum(line.sends for line in lines), len(lines)
    index = {line.peer: i for i, line in enumerate(lines)}
    sends = {line.peer: line.sends for line in lines}
    found = _Programme([line.peer for line in lines], [], [], [])
    for i, line in enumerate(lines):
        rate = rates[line.peer]
        found.top.append(0.0 if line.mode is Mode.CLIENT or rate == 0 else 1.0)
        if rate > 0:
            fixed = load(line, 0.0, senders)
            found.rows.append({i: load(line, 1.0, senders) - fixed, xi: -rate})
            found.right.append(-fixed)
    for (source, target), rate in pairs.items():
        if source in index and target in index and source != target:
            row = {xi: -rate}
            if sends[source]:
                row[index[target]] = 1.0
            if sends[target]:
                row[index[source]] = 1.0
            found.rows.append(row)
            found.right.append(0.0)
    return found


def _least_time(programme: _Programme) -> float:
    count = len(programme.peers)
    solution = _minimise(
        [0.0] * count + [1.0],
        (programme.rows, programme.right),
        [(0.0, top) for top in programme.top] + [(0.0, None)],
    )
    return float(solution.x[count])


def _evenest(programme: _Programme, lines: Sequence[MemberLine], rates: Mapping[str, float], xi: float) -> list[float]:
    """The most even shares that reach `xi`: the ratios share / cap, sorted descending, are lexicographically least."""
    count, xi = len(lines), xi * (1 + _SLACK)
    caps = _caps(programme, xi)
    right = [b - row.get(count, 0.0) * xi for row, b in zip(programme.rows, programme.right, strict=True)]
    fixed_rows = [{i: a for i, a in row.items() if i != count} for row in programme.rows]
    ceiling = [0.0 if cap <= _SLACK else top for cap, top in zip(caps, programme.top, strict=True)]
    free = [i for i in range(count) if ceiling[i] > 0]
    weights = [0.0] * count
    while free:
        relative = [{i: 1.0, count: -caps[i]} for i in free]
        solution = _minimise(
            [0.0] * count + [1.0],
            (fixed_rows + relative, right + [0.0] * len(free)),
            [(0.0, top) for top in ceiling] + [(0.0, None)],
        )
        weights, z = [float(w) for w in solution.x[:count]], float(solution.x[count])
        duals = solution.ineqlin.marginals[len(fixed_rows) :]
        # A nonzero multiplier: this share has the same value in every solution of this step.
        done = {i for i, dual in zip(free, duals, strict=True) if -dual > _DUAL} or set(free)
        for i in done:
            ceiling[i] = min(ceiling[i], z * caps[i] * (1 + _SLACK))
        free = [i for i in free if i not in done]
    return [max(0.0, weight) for weight in weights]


def _caps(programme: _Programme, xi: float) -> list[float]:
    """The largest share that each peer's own line can carry in `xi` seconds per byte."""
    count = len(programme.peers)
    caps = list(programme.top)
    for row, b in zip(programme.rows, programme.right, strict=True):
        own = [(i, a) for i, a in row.items() if i != count]
        if len(own) == 1 and own[0][1] > 0:
            i, a = own[0]
            caps[i] = max(0.0, min(caps[i], (b - row[count] * xi) / a))
    return caps


def _minimise(cost: list[float], limits: tuple[list[dict[int, float]], list[float]], bounds: list[Any]) -> Any:
    """Solve one linear programme in which the shares add up to one. Raises NoSplit if it has no solution."""
    import numpy as np  # imported late: slow to import, and light commands load this module
    from scipy.optimize import linprog  # type: ignore[import-untyped]
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

    rows, right = limits
    entries = [(r, c, a) for r, row in enumerate(rows) for c, a in row.items()]
    matrix = csr_matrix(
        ([a for _, _, a in entries], ([r for r, _, _ in entries], [c for _, c, _ in entries])),
        shape=(len(rows), len(cost)),
    )
    total = np.ones((1, len(cost)))
    total[0, -1] = 0.0
    solution = linprog(cost, A_ub=matrix, b_ub=right, A_eq=total, b_eq=[1.0], bounds=bounds, method="highs")
    if not solution.success:
        raise NoSplit("no peer that could sum is within reach of all senders")
    return solution
