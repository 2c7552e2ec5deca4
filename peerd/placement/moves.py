"""Moves of the search: which new members of some stages are worth evaluating.

The paper's move takes two stages and swaps an end of the fastest link inside one with such an end of the other. This
costs little averaging, which is bounded by slow links, and leaves a fast link between the two stages. Other moves swap
any two devices, a device with one near its new peers, the slowest device of the slowest stage, three in a ring, several
at once, or whole neighbourhoods. If sizes are free, single devices move, also to and from idleness; if the order is
kept, whole stages move.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

import numpy as np

from peerd.placement.layout import StageLayout
from peerd.placement.model import CostModel, Members
from peerd.placement.problem import IDLE, Matrix

Proposal = dict[int, Members]
NEAREST_OF: Final = 4  # devices drawn, of which the one nearest to its new peers is used


class Moves:
    """Draws moves for one layout, and tracks the stages of its devices."""

    def __init__(self, layout: StageLayout, rng: Random) -> None:
        self._layout, self._rng = layout, rng
        self._model: CostModel = layout.model
        problem = self._model.problem
        self._times = _times(self._model)
        self._classes = self._model.classes if layout.twins_are_one else list(range(len(problem.devices)))
        self._stages = len(problem.stages)
        self.stage_of = layout.stage_of()
        self._devices = len(self.stage_of)
        kinds: list[tuple[Callable[[], Proposal | None], int]] = []
        if self._stages > 1 or IDLE in self.stage_of:
            kinds += [(self._any_two, 4), (self._near_two, 3)]
        if self._stages > 1:
            kinds += [(self._fastest_ends, 3), (self._slowest, 2), (self._several, 2), (self._ring, 1)]
            kinds += [(self._neighbourhoods, 3)]
        if problem.sizes is None and self._devices > self._stages:
            kinds += [(self._one, 4)]
        if self._stages > 1 and not self._model.order_is_free:
            kinds += [(self._whole_stages, 2)]
        self._kinds = [kind for kind, weight in kinds for _ in range(weight)]

    def draw(self) -> Proposal | None:
        """A random move, or None if the one drawn changes nothing."""
        return self._rng.choice(self._kinds)() if self._kinds else None

    def follow(self) -> None:
        """Update the stages of devices after the layout has changed."""
        self.stage_of = self._layout.stage_of()

    def _swap(self, pairs: list[tuple[int, int]]) -> Proposal | None:
        """New members after swapping each pair of devices, one of which may be idle."""
        new: dict[int, list[int]] = {}
        for one, other in pairs:
            here, there = self.stage_of[one], self.stage_of[other]
            if here == there or self._classes[one] == self._classes[other]:
                continue
            for gone, come, stage in ((one, other, here), (other, one, there)):
                if stage != IDLE:
                    of = new.setdefault(stage, list(self._layout.members[stage]))
                    if gone not in of or come in of:
                        return None
                    of[of.index(gone)] = come
        return {stage: tuple(sorted(of)) for stage, of in new.items()} or None

    def _device(self) -> int:
        return self._rng.randrange(self._devices)

    def _any_two(self) -> Proposal | None:
        return self._swap([(self._device(), self._device())])

    def _near_two(self) -> Proposal | None:
        """Swap a device with one of another stage: of a few drawn ones, the nearest to the device's stage-mates."""
        one = self._device()
        return self._swap([(one, self._nearest(one))])

    def _nearest(self, one: int) -> int:
        here = self.stage_of[one]
        others = [other for other in (self._device() for _ in range(NEAREST_OF)) if self.stage_of[other] != here]
        if not others:
            return one
        if here == IDLE:
            return others[0]
        near = self._times[np.ix_(others, self._layout.members[here])].sum(1)
        return others[int(near.argmin())]

    def _two_stages(self) -> tuple[int, int]:
        one, other = self._rng.sample(range(self._stages), 2)
        return one, other

    def _fastest_ends(self) -> Proposal | None:
        """The paper's four swaps: with equal probability the one with the largest gain, or a random one."""
        stages = self._two_stages()
        here, there = (self._layout.members[stage] for stage in stages)
        mine, theirs = self._ends(here), self._ends(there)
        four = [(one, other) for one in mine for other in theirs]
        if self._rng.random() < 0.5:
            return self._swap([self._rng.choice(four)])
        return self._swap([max(four, key=lambda pair: self._gain(pair, (here, there), (mine, theirs)))])

    def _ends(self, members: Members) -> Members:
        if len(members) == 1:
            return members
        inside = self._times[np.ix_(members, members)]
        np.fill_diagonal(inside, np.inf)
        least = np.flatnonzero(inside == inside.min())
        one, other = divmod(int(least[self._rng.randrange(len(least))]), len(members))
        return members[one], members[other]

    def _gain(self, pair: tuple[int, int], stages: tuple[Members, Members], ends: tuple[Members, Members]) -> float:
        """Gain of swapping two devices: mean time to the other stage, minus that of the fast link inside their own."""
        gain = 0.0
        for device, to, own in zip(pair, stages[::-1], ends, strict=True):
            fast = max((float(self._times[device, end]) for end in own), default=0.0)
            gain += float(self._times[device, list(to)].mean()) - fast
        return gain

    def _slowest(self) -> Proposal | None:
        """Swap the slowest device of the slowest stage with one that is nearer to its stage-mates."""
        groups = self._layout.groups
        stage = max(range(self._stages), key=lambda at: groups[at].data_parallel_s)
        members = self._layout.members[stage]
        sums = self._times[np.ix_(members, members)].sum(1)
        slow = np.flatnonzero(sums >= sums.max() * (1 - 1e-12))
        one = members[int(slow[self._rng.randrange(len(slow))])]
        return self._swap([(one, self._nearest(one))])

    def _several(self) -> Proposal | None:
        """Swap two or more devices of a stage with the same number of another."""
        one, other = self._two_stages()
        mine, theirs = self._layout.members[one], self._layout.members[other]
        most = min(len(mine), len(theirs))
        if most < 2:
            return None
        count = 2 if self._rng.random() < 0.5 else self._rng.randint(2, most)
        return self._swap(list(zip(self._rng.sample(mine, count), self._rng.sample(theirs, count), strict=True)))

    def _neighbourhoods(self) -> Proposal | None:
        """Swap a device and its nearest devices in its stage with the same number of another stage."""
        stages = self._two_stages()
        most = min(len(self._layout.members[stage]) for stage in stages)
        if most < 4:
            return None
        count = min(most, 2 ** self._rng.randint(1, most.bit_length() - 1))
        return self._swap(list(zip(*(self._near(stage, count) for stage in stages), strict=True)))

    def _near(self, stage: int, count: int) -> list[int]:
        members = self._layout.members[stage]
        times = self._times[self._rng.choice(members), list(members)]
        return [members[at] for at in np.argsort(times, kind="stable")[:count].tolist()]

    def _ring(self) -> Proposal | None:
        """Move one device of each of three stages to the next of the three."""
        if self._stages < 3:
            return None
        stages = self._rng.sample(range(self._stages), 3)
        going = [self._rng.choice(self._layout.members[stage]) for stage in stages]
        new = {}
        for stage, gone, come in zip(stages, going, [going[2], *going[:2]], strict=True):
            new[stage] = tuple(sorted([*(device for device in self._layout.members[stage] if device != gone), come]))
        return new

    def _one(self) -> Proposal | None:
        """Move one or two devices to another stage, to idleness or from idleness."""
        new: dict[int, list[int]] = {}
        for device in self._rng.sample(range(self._devices), self._rng.choice((1, 1, min(2, self._devices)))):
            here, stage = self.stage_of[device], self._rng.randint(IDLE, self._stages - 1)
            for at in (at for at in (here, stage) if at != IDLE):
                new.setdefault(at, list(self._layout.members[at]))
            if here != IDLE:
                new[here].remove(device)
            if stage != IDLE:
                new[stage].append(device)
        if not all(new.values()):
            return None
        return {stage: tuple(sorted(of)) for stage, of in new.items()} or None

    def _whole_stages(self) -> Proposal | None:
        """Exchange the peers of two stages, or reverse a run of stages."""
        one, other = sorted(self._two_stages())
        members, sizes = self._layout.members, self._model.problem.sizes
        if self._rng.random() < 0.5:
            new = {one: members[other], other: members[one]}
        else:
            new = {one + at: members[other - at] for at in range(other - one + 1)}
        if sizes is not None and any(len(of) != sizes[stage] for stage, of in new.items()):
            return None
        return new


def _times(model: CostModel) -> Matrix:
    """A link's mean time for the data that averaging and pipelines send over it, [N, N]."""
    problem = model.problem
    size = sum(work.gradient * len(problem.stages) / len(problem.devices) for work in problem.stages)
    size += sum(work.activation for work in problem.stages)
    return model.links.delay_s + size / len(problem.stages) * model.links.s_per_byte
