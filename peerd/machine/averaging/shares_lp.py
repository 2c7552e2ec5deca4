"""Shares by bandwidth when lines between some pairs of peers are narrower than their ends: a linear programme.

To the closed form's limits (`shares`) comes one for each limited pair: from i to j travel i's version of what j sums
and the sums that i returns to j, w_j + w_i where both send. Minimise the round's time over the shares; among all
shares that reach it, the ones whose relative loads are lexicographically least: a unique answer, and the closed form's
where no pair binds. HiGHS solves it within some millionths; whoever solves it tells the others, who need not repeat it.

A limit of 0 says that nothing passes. Where no owner is within reach of all senders, one exact round is impossible
(NoSplit): what is left is gossip, an average within each of `islands`, and other groups in the next round.
Takes milliseconds to seconds and imports scipy: call it on a worker. Limits are measurements: a false one costs time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from peerd.machine.averaging.shares import (
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

_SLACK = 1e-7  # relative: what a solver's tolerance may cost
_DUAL = 1e-9  # a multiplier above this is not zero


def shares_within(lines: Sequence[MemberLine], pairs: Pairs) -> Shares:
    """The best division of the work when `pairs` are limited, too; the closed form's where they do not bind.

    If no line is known, all count as wide as the widest pair. Raises as `shares`, and NoSplit when some sender reaches
    nobody who could sum for all; ValueError for limits that are no rates.
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
    """The time that the slowest limited pair needs, in seconds per byte of the vector; inf: something cannot pass."""
    sends = {line.peer: line.sends for line in lines}
    worst = 0.0
    for (source, target), rate in pairs.items():
        if source in sends and target in sends and source != target:
            amount = sends[source] * fractions[target] + sends[target] * fractions[source]
            if amount > 0:
                worst = max(worst, amount / rate if rate > 0 else math.inf)
    return worst


def islands(lines: Sequence[MemberLine], pairs: Pairs) -> list[list[str]]:
    """Peers joined by pairs that pass something in both directions: each island can average within itself."""
    left = sorted(line.peer for line in lines)
    found: list[list[str]] = []
    while left:
        island, edge = [left[0]], [left.pop(0)]
        while edge:
            here = edge.pop()
            joined = [p for p in left if pairs.get((here, p), 1.0) > 0 and pairs.get((p, here), 1.0) > 0]
            left = [p for p in left if p not in joined]
            island += joined
            edge += joined
        found.append(sorted(island))
    return found


@dataclass(frozen=True, slots=True)
class _Programme:
    """The limits as rows of a x <= b over x = (shares in the order of `peers`, seconds per byte)."""

    peers: list[str]
    rows: list[dict[int, float]]  # column: coefficient
    right: list[float]
    top: list[float]  # the largest share of each peer


def solved(lines: Sequence[MemberLine], pairs: Pairs) -> Shares:
    """The result of `shares_within`, by the solver in any case."""
    rates = widths(lines)
    largest = max(rates.values(), default=0.0)
    if largest <= 0 or not any(line.sends for line in lines):
        return shares(lines)  # says what is wrong
    ordered = sorted(lines, key=lambda line: line.peer)
    # In units of the widest line: the solver's tolerances are absolute.
    programme = _programme(
        ordered,
        {peer: rate / largest for peer, rate in rates.items()},
        {pair: rate / largest for pair, rate in sorted(pairs.items())},
    )
    xi = _least_time(programme)
    weights = _evenest(programme, ordered, rates, xi)
    why = "lines between pairs of peers set the pace"
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
    """The most even of all shares that reach `xi`: their sorted share / cap, largest first, is least."""
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
        # A multiplier that is not zero: this share is as large in every solution of this step.
        done = {i for i, dual in zip(free, duals, strict=True) if -dual > _DUAL} or set(free)
        for i in done:
            ceiling[i] = min(ceiling[i], z * caps[i] * (1 + _SLACK))
        free = [i for i in free if i not in done]
    return [max(0.0, weight) for weight in weights]


def _caps(programme: _Programme, xi: float) -> list[float]:
    """The largest share that each peer's own line carries in `xi`."""
    count = len(programme.peers)
    caps = list(programme.top)
    for row, b in zip(programme.rows, programme.right, strict=True):
        own = [(i, a) for i, a in row.items() if i != count]
        if len(own) == 1 and own[0][1] > 0:
            i, a = own[0]
            caps[i] = max(0.0, min(caps[i], (b - row[count] * xi) / a))
    return caps


def _minimise(cost: list[float], limits: tuple[list[dict[int, float]], list[float]], bounds: list[Any]) -> Any:
    """One linear programme, with the shares adding up to one."""
    import numpy as np  # scipy and numpy are heavy, and light commands load this module
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
