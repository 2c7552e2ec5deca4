"""Cost model of one problem: costs of a stage's peers, of the links between two stages, and of the whole pipeline.

Caches its results by the classes of the devices in a stage: exchanging two identical devices changes nothing. Members
are sorted tuples of device numbers. The order of stages is free if they are all alike, unless it must be kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from peerd.placement.cost import DEAD_S, CostKind, PairTimes, PlacementCost, twins_of
from peerd.placement.matching import Matching, bottleneck, least_value, perfect
from peerd.placement.path import least_length, open_path
from peerd.placement.problem import Matrix, PlacementProblem

Members = tuple[int, ...]
Key = tuple[int, ...]  # classes of the members, sorted
UNITS: Final = 1 << 16  # total units of a stage whose shares are unequal
REMEMBERED: Final = 300_000  # cached stages, and cached pairs of stages


class Group(NamedTuple):
    """Costs of the peers of one stage."""

    data_parallel_s: float
    compute_s: float
    busy_s: float


class Edge(NamedTuple):
    """Costs between two neighbouring stages: the pass there and back, and the further busy time of the busiest link."""

    pass_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Pairs:
    """Times of the pairs between two stages, [n, m], and the shares to match, or None if each peer has one partner."""

    pass_s: Matrix
    busy_s: Matrix | None
    supply: list[int] | None
    demand: list[int] | None


class CostModel:
    """The cost model of one problem and one kind of cost."""

    def __init__(self, problem: PlacementProblem, kind: CostKind, keep_order: bool = False) -> None:
        self.problem, self.kind = problem, kind
        self.links = PairTimes.of(problem)
        self.order_is_free = problem.stages_alike and not keep_order
        self.classes = twins_of(problem, self.links)
        kinds = list(dict.fromkeys(problem.stages))
        self._kind_of = [kinds.index(work) for work in problem.stages]
        speeds = np.array([device.speed for device in problem.devices])
        known = speeds[np.isfinite(speeds)]
        self._timed = bool(len(known))
        # A device of unknown speed counts as the fastest of the known ones.
        self._speed = np.where(np.isfinite(speeds), speeds, known.max() if len(known) else 1.0)
        self._one_speed = bool((self._speed == self._speed[0]).all())
        self._memory = np.array([device.memory for device in problem.devices])
        self._groups: dict[tuple[int, Key], Group] = {}
        self._edges: dict[tuple[int, Key, Key], Edge] = {}

    def key(self, members: Sequence[int]) -> Key:
        classes = self.classes
        return tuple(sorted([classes[device] for device in members]))

    def group(self, stage: int, members: Members, key: Key) -> Group:
        """Costs of a stage: averaging (equation 2), computing, and the busiest device after the first microbatch."""
        kind = self._kind_of[stage]
        found = self._groups.get((kind, key))
        if found is None:
            if len(self._groups) >= REMEMBERED:
                self._groups.clear()
            found = self._groups[kind, key] = self._group(stage, list(members))
        return found

    def _group(self, stage: int, members: list[int]) -> Group:
        work, count = self.problem.stages[stage], len(members)
        if not count:
            return Group(DEAD_S, 0.0, 0.0)
        block = np.ix_(members, members)
        of_each = self.links.delay_s[block].sum(1) + work.gradient / count * self.links.s_per_byte[block].sum(1)
        unfit = int((self._memory[members] < work.memory).sum())
        data_parallel_s = 2 * float(of_each.max()) + DEAD_S * unfit
        if not self._timed or not work.flops:
            return Group(data_parallel_s, 0.0, 0.0)
        speed = self._speed[members]
        all_s = self.problem.microbatches * work.flops / float(speed.sum())
        if self.kind is CostKind.LATENCY:
            return Group(data_parallel_s, all_s, 0.0)
        return Group(
            data_parallel_s, work.flops / float(speed.min()), max(0.0, all_s - work.flops / float(speed.max()))
        )

    def remembered_edge(self, stage: int, one: Key, other: Key) -> Edge | None:
        return self._edges.get(self._edge_key(stage, one, other))

    def edge(self, stage: int, one: Key, other: Key, pairs: Pairs) -> Edge:
        """Costs between `stage` and the next one."""
        if len(self._edges) >= REMEMBERED:
            self._edges.clear()
        found = self._edges[self._edge_key(stage, one, other)] = Edge(*self._matched(pairs)[:2])
        return found

    def _edge_key(self, stage: int, one: Key, other: Key) -> tuple[int, Key, Key]:
        if self.order_is_free and other < one:  # the same, the other way around
            one, other = other, one
        return (self._kind_of[stage], one, other)

    def matching(self, stage: int, one: Members, other: Members) -> Matching:
        """Which peers of a stage send to which of the next."""
        return self._matched(self.pairs(stage, one, other))[2]

    def least_edge(self, pairs: Pairs) -> Edge:
        """Lower bounds of both costs."""
        return Edge(least_value(pairs.pass_s), 0.0 if pairs.busy_s is None else least_value(pairs.busy_s))

    def pairs(self, stage: int, one: Members, other: Members) -> Pairs:
        """Times of the pairs between a stage and the next one."""
        size, count = self.problem.stages[stage].activation, self.problem.microbatches
        block = (np.array(one)[:, None], np.array(other))
        delay_s, s_per_byte = self.links.delay_s[block], self.links.s_per_byte[block]
        supply: list[int] | None = None
        demand: list[int] | None = None
        load: float | Matrix
        if self._one_speed:
            load = count / max(1, min(len(one), len(other)))
            if len(one) != len(other):
                common = math.gcd(len(one), len(other))
                supply, demand = [len(other) // common] * len(one), [len(one) // common] * len(other)
        else:
            shares = [self._speed[list(of)] / self._speed[list(of)].sum() for of in (one, other)]
            load = count * np.maximum(shares[0][:, None], shares[1][None, :])
            if len(one) != len(other) or not all((share == share[0]).all() for share in shares):
                supply, demand = _units(shares[0]), _units(shares[1])
        if self.kind is CostKind.LATENCY:
            return Pairs(2 * (delay_s + load * size * s_per_byte), None, supply, demand)
        busy_s = np.maximum(0.0, load - 1.0) * size * self.links.slower_s_per_byte[block]
        busy_s[delay_s >= DEAD_S] = DEAD_S  # a missing link must not count as idle
        return Pairs(2 * (delay_s + size * s_per_byte), busy_s, supply, demand)

    def _matched(self, pairs: Pairs) -> tuple[float, float, Matching]:
        """`pass_s`, `busy_s`, and the matching that has both: a least busy one, and of these a fastest one."""
        pass_s, busy_s = pairs.pass_s, 0.0
        if pairs.busy_s is not None and pairs.busy_s.any():
            busy_s = bottleneck(pairs.busy_s, pairs.supply, pairs.demand).value
            pass_s = np.where(pairs.busy_s <= busy_s, pass_s, 1e3 * DEAD_S)
        if pairs.supply is None:
            value, partner = perfect(pass_s)
            return value, busy_s, Matching(value, tuple((row, column, 1) for row, column in enumerate(partner)))
        found = bottleneck(pass_s, pairs.supply, pairs.demand)
        return found.value, busy_s, found

    def arrange(
        self, pass_s: Matrix, busy_s: Matrix, least_busy_s: float, near: list[int] | None = None
    ) -> tuple[float, float, list[int]]:
        """Sum of the passes, longest busy time, and the order of stages with the least total. Matrices are [S, S].

        `least_busy_s`: time of the busiest device. `near`: an order to start from if there are too many to try all. If
        the order must be kept, only edges between neighbours count.
        """
        if not self.order_is_free:
            order = list(range(len(pass_s)))
            busy = max([least_busy_s, *np.diagonal(busy_s, 1).tolist()])
            return float(np.diagonal(pass_s, 1).sum()), busy, order
        passed, order = open_path(pass_s, near)
        busy = max([least_busy_s, *busy_s[order[:-1], order[1:]].tolist()])
        if self.kind is CostKind.LATENCY or busy <= least_busy_s:
            return passed, busy, order
        found, least = (passed, busy, order), passed
        for bound in np.unique(np.maximum(busy_s[np.triu_indices(len(busy_s), 1)], least_busy_s)).tolist():
            if bound + least >= found[0] + found[1]:
                break
            passed, order = open_path(np.where(busy_s <= bound, pass_s, 1e3 * DEAD_S), order)
            if passed + bound < found[0] + found[1]:
                found = (passed, bound, order)
        return found

    def least(self, pass_s: Matrix) -> float:
        """Lower bound of the sum of passes."""
        return least_length(pass_s) if self.order_is_free else float(np.diagonal(pass_s, 1).sum())

    def cost(self, groups: Sequence[Group], passed_s: float, busy_s: float, moving_s: float = 0.0) -> PlacementCost:
        slowest, compute_s = max(group.data_parallel_s for group in groups), sum(group.compute_s for group in groups)
        return PlacementCost(self.kind, slowest, passed_s, compute_s, busy_s, moving_s)


def _units(shares: NDArray[np.float64]) -> list[int]:
    """Shares as integers with sum `UNITS`, at least one each; the rest is assigned by the largest remainders."""
    spare = UNITS - len(shares)
    exact = shares * spare
    units = np.floor(exact).astype(int)
    first = np.argsort(units - exact, kind="stable")[: spare - int(units.sum())]
    units[first] += 1
    found: list[int] = (units + 1).tolist()
    return found
