"""Layout: the stages' members under search, and what a change of some of them would cost.

A change is refused as early as its cost is known to exceed the bar: after averaging, after bounds from below of the
edges, or in full. Costs under search also count a little of what the slowest hides: see `EVENED`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from peerd.machine.placement.cost import PlacementCost
from peerd.machine.placement.model import CostModel, Group, Key, Members
from peerd.machine.placement.problem import IDLE, Matrix

EVENED: Final = 0.05  # weight of the mean stage's averaging: what brings one stage down counts before the others follow


@dataclass(frozen=True, slots=True)
class Moving:
    """What moving costs: seconds of a step for each device whose stage differs from `stage_of`; from idle too."""

    stage_of: tuple[int, ...]
    each_s: float

    def of(self, device: int, stage: int) -> float:
        return self.each_s if self.stage_of[device] != stage else 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """New members of some stages, and all that follows from them."""

    members: Mapping[int, Members]
    keys: list[Key]
    groups: list[Group]
    pass_s: Matrix
    busy_s: Matrix
    moving_s: float
    order: list[int]
    cost: PlacementCost
    searched_s: float  # what the search compares


class StageLayout:
    """Members of each stage, and of the idle."""

    def __init__(self, model: CostModel, members: Sequence[Members], moving: Moving | None = None) -> None:
        self.model = model
        self._moving = moving
        count = len(members)
        self.members = list(members)
        self.keys: list[Key] = [()] * count
        self.groups: list[Group] = [Group(0.0, 0.0, 0.0)] * count
        self._pass_s = np.zeros((count, count))
        self._busy_s = np.zeros((count, count))
        self._moving_s = 0.0
        self._between = self._neighbours()
        change = self.changed(dict(enumerate(members)), np.inf)
        assert change is not None  # nothing exceeds an infinite bar
        self.take(change)

    @property
    def twins_are_one(self) -> bool:
        """True when exchanging two devices that are alike changes nothing."""
        return self._moving is None

    @property
    def cost(self) -> PlacementCost:
        return self._change.cost

    @property
    def searched_s(self) -> float:
        return self._change.searched_s

    @property
    def order(self) -> list[int]:
        """Stages along the pipeline."""
        return self._change.order

    def stage_of(self) -> list[int]:
        """The stage of each device, as numbered here, not in the order of the pipeline."""
        found = [IDLE] * len(self.model.classes)
        for stage, members in enumerate(self.members):
            for device in members:
                found[device] = stage
        return found

    def take(self, change: Change) -> None:
        """Makes a change."""
        for stage, members in change.members.items():
            self.members[stage] = members
        self.keys, self.groups = change.keys, change.groups
        self._pass_s, self._busy_s, self._moving_s = change.pass_s, change.busy_s, change.moving_s
        self._change = change

    def changed(self, members: Mapping[int, Members], bar_s: float) -> Change | None:
        """What new members of some stages come to; None where that is more than the bar."""
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
        edges = self._edges(members, keys, bar_s - known_s - evened_s - least_busy_s)
        if edges is None:
            return None
        pass_s, busy_s = edges
        passed_s, longest_s, order = model.arrange(pass_s, busy_s, least_busy_s)
        cost = model.cost(groups, passed_s, longest_s, moving_s)
        searched_s = cost.total_s + evened_s
        if searched_s > bar_s:
            return None
        return Change(members, keys, groups, pass_s, busy_s, moving_s, order, cost, searched_s)

    def _moved(self, members: Mapping[int, Members]) -> float:
        if self._moving is None:
            return 0.0
        found = 0.0
        for stage, of in enumerate(self.members):
            found += sum(self._moving.of(device, stage) for device in members.get(stage, of))
        return found

    def _neighbours(self) -> list[list[tuple[int, int]]]:
        """Of each stage, the pairs (stage, next) that it is in: all others where the order is free."""
        count = len(self.members)
        if self.model.order_is_free:
            return [[(stage, other) for other in range(count) if other != stage] for stage in range(count)]
        near = [(stage, stage + 1) for stage in range(count - 1)]
        return [[pair for pair in near if stage in pair] for stage in range(count)]

    def _edges(self, members: Mapping[int, Members], keys: list[Key], bar_s: float) -> tuple[Matrix, Matrix] | None:
        """Edges with those of the new members, None where their sum of passes exceeds the bar."""
        model, pass_s, busy_s = self.model, self._pass_s.copy(), self._busy_s.copy()
        open_, seen = [], set()
        free = model.order_is_free
        for stage in members:
            for one, other in self._between[stage]:
                both = (one, other) if one < other else (other, one)
                if both in seen:
                    continue
                seen.add(both)
                found = model.remembered_edge(one, keys[one], keys[other])
                if found is None:
                    mine, theirs = members.get(one, self.members[one]), members.get(other, self.members[other])
                    pairs = model.pairs(one, mine, theirs)
                    open_.append((one, other, pairs))
                    pass_s[one, other] = model.least_pass_s(pairs)
                else:
                    pass_s[one, other], busy_s[one, other] = found
                if free:
                    pass_s[other, one], busy_s[other, one] = pass_s[one, other], busy_s[one, other]
        if model.least(pass_s) > bar_s:
            return None
        for one, other, pairs in open_:
            pass_s[one, other], busy_s[one, other] = model.edge(one, keys[one], keys[other], pairs)
            if free:
                pass_s[other, one], busy_s[other, one] = pass_s[one, other], busy_s[one, other]
        if open_ and model.least(pass_s) > bar_s:
            return None
        return pass_s, busy_s
