"""Layout: the stages' members during the search, and the cost of changing some of them.

A change is rejected as soon as its cost is known to exceed a threshold, the bar: after averaging, after lower bounds
of the edges, or in full. Costs during the search include a fraction of the mean stage, which the slowest one hides: see
`EVENED`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from peerd.placement.cost import PlacementCost
from peerd.placement.model import CostModel, Edge, Group, Key, Members, Pairs
from peerd.placement.problem import IDLE, Matrix

FEW_STAGES: Final = 10
EVENED: Final = 0.05  # weight of the mean stage's averaging, so that improving a single stage counts


@dataclass(frozen=True, slots=True)
class MoveCost:
    """The cost of moving: seconds per step for each device whose stage differs from `stage_of`, including idle ones."""

    stage_of: tuple[int, ...]
    each_s: float

    def of(self, device: int, stage: int) -> float:
        return self.each_s if self.stage_of[device] != stage else 0.0


@dataclass(frozen=True, slots=True)
class Edges:
    """Times between each two stages, [S, S], symmetric; lower bounds unless `exact`."""

    pass_s: Matrix
    busy_s: Matrix
    exact: NDArray[np.bool_]

    @classmethod
    def none(cls, stages: int) -> Edges:
        shape = (stages, stages)
        return cls(np.zeros(shape), np.zeros(shape), np.ones(shape, dtype=bool))

    def copy(self) -> Edges:
        return Edges(self.pass_s.copy(), self.busy_s.copy(), self.exact.copy())

    def put(self, one: int, other: int, edge: Edge, *, exact: bool) -> None:
        self.pass_s[one, other] = self.pass_s[other, one] = edge.pass_s
        self.busy_s[one, other] = self.busy_s[other, one] = edge.busy_s
        self.exact[one, other] = self.exact[other, one] = exact

    def open_along(self, order: list[int]) -> list[tuple[int, int]]:
        """Neighbours in an order whose edge is not exact."""
        return [(one, other) for one, other in itertools.pairwise(order) if not self.exact[one, other]]


@dataclass(frozen=True, slots=True)
class Change:
    """New members of some stages, and everything computed for them."""

    members: Mapping[int, Members]
    keys: list[Key]
    groups: list[Group]
    edges: Edges
    moving_s: float
    order: list[int]
    cost: PlacementCost
    searched_s: float  # the cost that the search compares


class StageLayout:
    """Members of each stage; all other devices are idle."""

    def __init__(
        self,
        model: CostModel,
        members: Sequence[Members],
        moving: MoveCost | None = None,
        order: list[int] | None = None,
    ) -> None:
        self.model = model
        self._moving = moving
        count = len(members)
        self.members = list(members)
        self.keys: list[Key] = [()] * count
        self.groups: list[Group] = [Group(0.0, 0.0, 0.0)] * count
        self._known = Edges.none(count)
        self._order = order
        self._between = self._neighbours()
        change = self.changed(dict(enumerate(members)), np.inf)
        assert change is not None  # nothing exceeds an infinite bar
        self.take(change)

    @property
    def twins_are_one(self) -> bool:
        """True if exchanging two identical devices changes nothing."""
        return self._moving is None

    @property
    def cost(self) -> PlacementCost:
        return self._change.cost

    @property
    def searched_s(self) -> float:
        return self._change.searched_s

    @property
    def order(self) -> list[int]:
        """Stages in the order of the pipeline."""
        return self._change.order

    def stage_of(self) -> list[int]:
        """The stage of each device, by the numbers used here, not in the order of the pipeline."""
        found = [IDLE] * len(self.model.classes)
        for stage, members in enumerate(self.members):
            for device in members:
                found[device] = stage
        return found

    def take(self, change: Change) -> None:
        """Apply a change."""
        for stage, members in change.members.items():
            self.members[stage] = members
        self.keys, self.groups = change.keys, change.groups
        self._known, self._order = change.edges, change.order
        self._change = change

    def changed(self, members: Mapping[int, Members], bar_s: float) -> Change | None:
        """The change to new members of some stages, or None if its cost exceeds `bar_s`."""
        model, keys, groups = self.model, self.keys.copy(), self.groups.copy()
        for stage, of in members.items():
            keys[stage] = key = model.key(of)
            groups[stage] = model.group(stage, of, key)
        averaging = [group.data_parallel_s for group in groups]
        moving_s = self._moved(members)
        known_s = max(averaging) + sum([group.compute_s for group in groups]) + moving_s
        evened_s = EVENED * sum(averaging) / len(averaging)
        least_busy_s = max([group.busy_s for group in groups])
        if known_s + evened_s + least_busy_s > bar_s:
            return None
        edges = self._edges(members, keys)
        at_most_s = bar_s - known_s - evened_s
        if not self._exact(edges, self._soon(edges), members, keys, at_most_s - least_busy_s):
            return None
        near: list[int] | None = self._order
        while True:  # edges off the path stay lower bounds: no path that uses them is shorter
            passed_s, longest_s, order = model.arrange(edges.pass_s, edges.busy_s, least_busy_s, near)
            if passed_s + longest_s > at_most_s:
                return None
            open_ = edges.open_along(order)
            if not open_:
                break
            self._exact(edges, open_, members, keys, np.inf)
            near = order
        cost = model.cost(groups, passed_s, longest_s, moving_s)
        searched_s = cost.total_s + evened_s
        if searched_s > bar_s:
            return None
        return Change(members, keys, groups, edges, moving_s, order, cost, searched_s)

    def _moved(self, members: Mapping[int, Members]) -> float:
        if self._moving is None:
            return 0.0
        found = 0.0
        for stage, of in enumerate(self.members):
            found += sum(self._moving.of(device, stage) for device in members.get(stage, of))
        return found

    def _neighbours(self) -> list[list[tuple[int, int]]]:
        """For each stage, the pairs (stage, next) that contain it; with all other stages if the order is free."""
        count = len(self.members)
        if self.model.order_is_free:
            return [[(stage, other) for other in range(count) if other != stage] for stage in range(count)]
        near = [(stage, stage + 1) for stage in range(count - 1)]
        return [[pair for pair in near if stage in pair] for stage in range(count)]

    def _edges(self, members: Mapping[int, Members], keys: list[Key]) -> Edges:
        """Edges for the new members: known ones, or lower bounds."""
        edges, seen = self._known.copy(), set()
        for stage in members:
            for one, other in self._between[stage]:
                both = (one, other) if one < other else (other, one)
                if both not in seen:
                    seen.add(both)
                    known = self.model.remembered_edge(one, keys[one], keys[other])
                    if known is None:
                        pairs = self._pairs(one, other, members)
                        edges.put(one, other, self.model.least_edge(pairs), exact=False)
                    else:
                        edges.put(one, other, known, exact=True)
        return edges

    def _pairs(self, one: int, other: int, members: Mapping[int, Members]) -> Pairs:
        return self.model.pairs(one, members.get(one, self.members[one]), members.get(other, self.members[other]))

    def _soon(self, edges: Edges) -> list[tuple[int, int]]:
        """Edges to compute exactly before a path is searched: all of them if that is faster than searching again."""
        if len(self.members) <= FEW_STAGES or self._order is None:
            return [(one, other) for one, other in np.argwhere(~edges.exact).tolist() if one < other]
        return edges.open_along(self._order)

    def _exact(
        self,
        edges: Edges,
        open_: list[tuple[int, int]],
        members: Mapping[int, Members],
        keys: list[Key],
        bar_s: float,
    ) -> bool:
        """Compute edges exactly; returns False as soon as the shortest path is sure to exceed `bar_s`."""
        if self.model.least(edges.pass_s) > bar_s:
            return False
        for one, other in open_:
            pairs = self._pairs(one, other, members)
            edges.put(one, other, self.model.edge(one, keys[one], keys[other], pairs), exact=True)
        return not open_ or bool(self.model.least(edges.pass_s) <= bar_s)
