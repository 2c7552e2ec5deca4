"""Initial placements for a search: random ones, and ones along the tree of the fastest links.

In the order of that tree, nearby devices are next to each other. Dealt out in blocks, each stage is a neighbourhood and
averages fast; dealt out one by one, neighbours are in different stages, and pipelines stay within a neighbourhood.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage  # type: ignore[import-untyped]
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]
from scipy.spatial.distance import squareform  # type: ignore[import-untyped]

from peerd.placement.cost import PairTimes
from peerd.placement.problem import IDLE, NoPlacement, PlacementProblem, StagePlacement

Stages = tuple[tuple[int, ...], ...]  # members of each


def check_fits(problem: PlacementProblem) -> None:
    """Raise NoPlacement if the number of devices or their memory is not enough to fill each stage."""
    needs = wanted(problem)
    if len(problem.devices) < sum(needs):
        raise NoPlacement(f"{len(problem.devices)} devices are too few for {sum(needs)} places in {len(needs)} stages")
    places = [stage for stage, count in enumerate(needs) for _ in range(count)]
    unfit = _unfit(problem)[:, places]
    rows, columns = linear_sum_assignment(unfit)
    missing = [places[column] for row, column in zip(rows, columns, strict=True) if unfit[row, column]]
    if missing:
        stage = missing[0]
        able = sum(device.memory >= problem.stages[stage].memory for device in problem.devices)
        raise NoPlacement(
            f"stage {stage} needs {problem.stages[stage].memory:,.0f} bytes of memory; {able} of "
            f"{len(problem.devices)} devices have that much, too few for this and the other stages"
        )


def wanted(problem: PlacementProblem) -> tuple[int, ...]:
    """Least number of devices of each stage."""
    return problem.sizes or (1,) * len(problem.stages)


def _unfit(problem: PlacementProblem) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    memory = np.array([device.memory for device in problem.devices])
    needed = np.array([work.memory for work in problem.stages])
    return (memory[:, None] < needed[None, :]).astype(np.float64)


def by_random(problem: PlacementProblem, rng: Random, *, some_idle: bool = False) -> Stages:
    """Devices dealt out one by one in random order; if memory is short, devices go where they fit.

    `some_idle`: a random number of devices stays idle, if sizes are free.
    """
    order = list(range(len(problem.devices)))
    rng.shuffle(order)
    if some_idle and problem.sizes is None:
        order = order[: rng.randint(len(problem.stages), len(order))]
    return dealt(problem, order, 1)


def random_placement(problem: PlacementProblem, rng: Random) -> StagePlacement:
    """A random placement, for comparison: stages of equal size, or of the given sizes."""
    stage_of = [IDLE] * len(problem.devices)
    for stage, members in enumerate(by_random(problem, rng)):
        for device in members:
            stage_of[device] = stage
    return StagePlacement(tuple(stage_of))


def by_links(problem: PlacementProblem, links: PairTimes, rng: Random) -> Iterator[Stages]:
    """Placements along the tree of the fastest links, in blocks of whole stages, halved down to single devices."""
    order = _along_the_tree(problem, links, rng)
    block = max(1, round(len(order) / len(problem.stages)))
    while True:
        yield dealt(problem, order, block)
        if block == 1:
            return
        block = (block + 1) // 2


def _along_the_tree(problem: PlacementProblem, links: PairTimes, rng: Random) -> list[int]:
    count = len(problem.devices)
    if count < 3:
        return list(range(count))
    size = sum(work.gradient / count + work.activation for work in problem.stages) / len(problem.stages)
    times = links.delay_s + size * links.s_per_byte
    shuffled = list(range(count))
    rng.shuffle(shuffled)  # so that ties are broken differently each time
    tree = linkage(squareform(times[np.ix_(shuffled, shuffled)], checks=False), method="average")
    return [shuffled[leaf] for leaf in leaves_list(tree).tolist()]


def dealt(problem: PlacementProblem, order: Sequence[int], block: int) -> Stages:
    """Devices dealt out in blocks, in the given order, to stages in turn, if there is room and enough memory."""
    stages, needs = len(problem.stages), wanted(problem)
    room = list(problem.sizes or _even(len(problem.devices), stages))
    members: list[list[int]] = [[] for _ in range(stages)]
    turn, given, left = 0, 0, []
    for device in order:
        for ahead in range(stages):
            stage = (turn + ahead) % stages
            if len(members[stage]) < room[stage] and fits(problem, device, stage):
                members[stage].append(device)
                break
        else:
            left.append(device)
            continue
        given += 1
        if given % block == 0:
            turn = (turn + 1) % stages
    for device in left if problem.sizes is None else ():
        able = [stage for stage in range(stages) if fits(problem, device, stage)]
        if able:
            members[min(able, key=lambda stage: len(members[stage]))].append(device)
    _filled(problem, members, needs)
    return tuple(tuple(sorted(of)) for of in members)


def _even(devices: int, stages: int) -> list[int]:
    return [devices // stages + (stage < devices % stages) for stage in range(stages)]


def fits(problem: PlacementProblem, device: int, stage: int) -> bool:
    return problem.devices[device].memory >= problem.stages[stage].memory


def _filled(problem: PlacementProblem, members: list[list[int]], needs: Sequence[int]) -> None:
    """Fill stages that have too few devices by an assignment by memory, with as few moves as possible."""
    if all(len(of) >= need for of, need in zip(members, needs, strict=True)):
        return
    places = [stage for stage, count in enumerate(needs) for _ in range(count)]
    stage_of = {device: stage for stage, of in enumerate(members) for device in of}
    costs = 1e3 * _unfit(problem)[:, places]
    costs += np.array([[stage_of.get(device) != stage for stage in places] for device in range(len(problem.devices))])
    rows, columns = linear_sum_assignment(costs)
    if problem.sizes is not None:  # every place is assigned: devices without one stay idle
        stage_of = {}
        for of in members:
            of.clear()
    for device, column in zip(rows.tolist(), columns.tolist(), strict=True):
        if device in stage_of:
            members[stage_of[device]].remove(device)
        members[places[column]].append(device)
