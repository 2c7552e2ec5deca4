"""Enumeration of every placement of a small problem, each once.

If the order of stages is free, stages are numbered by their first device; among identical devices, a later one's stage
is not below an earlier one's.
"""

from __future__ import annotations

from collections.abc import Iterator

from peerd.machine.placement.problem import IDLE, PlacementProblem
from peerd.machine.placement.starts import Stages, fits


def count_bound(problem: PlacementProblem) -> int:
    """Upper bound of the number of placements, without enumerating them."""
    choices = len(problem.stages) + (problem.sizes is None or sum(problem.sizes) < len(problem.devices))
    return int(choices ** len(problem.devices))


def all_placements(problem: PlacementProblem, classes: list[int], order_is_free: bool) -> Iterator[Stages]:
    """Members of each stage, for each placement. `classes`: devices of one class are interchangeable."""
    count, stages = len(problem.devices), len(problem.stages)
    before = {
        device: max((d for d in range(device) if classes[d] == classes[device]), default=-1) for device in range(count)
    }
    stage_of: list[int] = []
    members: list[list[int]] = [[] for _ in range(stages)]

    def full(stage: int) -> bool:
        return problem.sizes is not None and len(members[stage]) >= problem.sizes[stage]

    def rest(opened: int) -> Iterator[Stages]:
        device = len(stage_of)
        if device == count:
            if all(members) and (problem.sizes is None or all(full(stage) for stage in range(stages))):
                yield tuple(tuple(of) for of in members)
            return
        least = stage_of[before[device]] if before[device] >= 0 else IDLE
        for stage in range(least, min(stages, opened + 1) if order_is_free else stages):
            if stage != IDLE and (full(stage) or not fits(problem, device, stage)):
                continue
            stage_of.append(stage)
            if stage != IDLE:
                members[stage].append(device)
            yield from rest(max(opened, stage + 1))
            stage_of.pop()
            if stage != IDLE:
                members[stage].pop()

    yield from rest(0)
