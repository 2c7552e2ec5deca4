"""Baselines of the planner: plain Kernighan-Lin, and the genetic search of the DT-FM paper.

Both need stages of equal size. The genetic search follows the published one: two parents are drawn uniformly from 100
slots; the child is one of them with five labels of the other, repaired to equal sizes; after one circular pass of local
search with the paper's gain, it replaces the worse parent if it is better. Costs are computed by the planner's model.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from peerd.placement.cost import CostKind
from peerd.placement.layout import StageLayout
from peerd.placement.model import CostModel
from peerd.placement.problem import PlacementProblem

Labels = NDArray[np.intp]  # the stage of each device
POPULATION = 100
TRIALS = 4900
CROSSED = 5


class Partitions:
    """Partitions of a problem into stages of equal size."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.model = CostModel(problem, CostKind.LATENCY)
        self.devices, self.stages = len(problem.devices), len(problem.stages)
        self.size, work = self.devices // self.stages, problem.stages[0]
        links = self.model.links
        self.pipeline_s = links.delay_s + work.activation * links.s_per_byte
        self.averaging_s = links.delay_s + work.gradient / self.size * links.s_per_byte

    def drawn(self, rng: np.random.Generator) -> Labels:
        labels = np.arange(self.devices) % self.stages
        rng.shuffle(labels)
        return labels

    def cost_s(self, labels: Labels) -> float:
        members = [tuple(np.flatnonzero(labels == stage).tolist()) for stage in range(self.stages)]
        return StageLayout(self.model, members).cost.total_s


def kernighan_lin(partitions: Partitions, labels: Labels) -> Labels:
    """Kernighan-Lin: passes of pair swaps that reduce the sum of links, with averaging inside and pipelines between
    stages.
    """
    weight = partitions.pipeline_s - partitions.averaging_s
    np.fill_diagonal(weight, 0.0)
    while True:
        labels, gained = _pass(weight, labels, partitions.stages)
        if gained <= 1e-9:
            return labels


def _pass(weight: NDArray[np.float64], labels: Labels, stages: int) -> tuple[Labels, float]:
    labels, free = labels.copy(), np.ones(len(labels), dtype=bool)
    best, best_sum, total = labels.copy(), 0.0, 0.0
    to = np.stack([weight[:, labels == stage].sum(1) for stage in range(stages)], axis=1)
    every = np.arange(len(labels))
    for _ in range(len(labels) // 2):
        moved = to[:, labels] - to[every, labels][:, None]  # gain of moving each device to each other's stage
        gain = moved + moved.T - 2 * weight
        gain[(labels[:, None] == labels[None]) | ~free[:, None] | ~free[None]] = -np.inf
        one, other = divmod(int(gain.argmax()), len(labels))
        if not np.isfinite(gain[one, other]):
            break
        total += float(gain[one, other])
        here, there = labels[one], labels[other]
        to[:, here] += weight[:, other] - weight[:, one]
        to[:, there] += weight[:, one] - weight[:, other]
        labels[one], labels[other] = there, here
        free[[one, other]] = False
        if total > best_sum:
            best, best_sum = labels.copy(), total
    return best, best_sum


def circular(partitions: Partitions, labels: Labels) -> Labels:
    """One pass of the paper's local search: cycles of moves. The prefix with the best total gain is kept."""
    labels = labels.copy()
    locked = np.zeros(partitions.devices, dtype=bool)
    touched: set[int] = set()
    best, best_sum, total = labels.copy(), 0.0, 0.0
    for _ in range(partitions.stages):
        if len(touched) == partitions.stages:
            break
        gained = _cycle(partitions, labels, locked, touched)
        if gained is None:
            break
        total += gained
        if total > best_sum:
            best, best_sum = labels.copy(), total
    return best


def _gains(partitions: Partitions, labels: Labels, locked: NDArray[np.bool_]) -> tuple[Labels, NDArray[np.float64]]:
    """The device of each stage to move, or -1, and its gain in each other stage, [S, S]."""
    links, stages = partitions.pipeline_s, partitions.stages
    own = np.where(labels[:, None] == labels[None], links, np.inf)
    np.fill_diagonal(own, np.inf)
    fastest = own.min(axis=1)
    fastest[locked] = np.inf
    member = labels[None] == np.arange(stages)[:, None]
    by_stage = np.where(member, fastest, np.inf)
    candidates = np.where(np.isfinite(by_stage.min(axis=1)), by_stage.argmin(axis=1), -1)
    mean = links[candidates] @ member.T / np.maximum(1, member.sum(axis=1))
    gains = mean - fastest[candidates][:, None]
    gains[candidates < 0] = -np.inf
    np.fill_diagonal(gains, -np.inf)
    return candidates, gains


def _cycle(partitions: Partitions, labels: Labels, locked: NDArray[np.bool_], touched: set[int]) -> float | None:
    """Move devices from stage to stage in a cycle, in place. Returns the sum of gains, or None if no device is left."""
    candidates, gains = _gains(partitions, labels, locked)
    untouched = np.array([stage not in touched for stage in range(partitions.stages)])
    first = int(np.where(untouched, gains.max(axis=1), -np.inf).argmax())
    if not untouched[first] or not np.isfinite(gains[first].max()):
        return None
    moved: list[int] = []
    sums = 0.0
    at, closing = first, (-np.inf, 0)  # best sum if the cycle is closed, and after how many moves
    for _ in range(partitions.devices):
        to = int(gains[at].argmax())
        if not np.isfinite(gains[at, to]):
            break
        if at != first and sums + gains[at, first] > closing[0]:
            closing = (sums + float(gains[at, first]), len(moved))
        device = int(candidates[at])
        sums += float(gains[at, to])
        moved.append(device)
        touched.add(at)
        labels[device], locked[device] = to, True
        if to == first:
            if sums > closing[0]:
                return sums
            break
        at = to
        candidates, gains = _gains(partitions, labels, locked)
    return _closed(labels, moved, first, closing)


def _closed(labels: Labels, moved: list[int], first: int, closing: tuple[float, int]) -> float:
    """Undo the moves after the best closing of a cycle, and move its last device to the first stage."""
    value, kept = closing
    went_to = [int(labels[device]) for device in moved]
    came_from = [first, *went_to[:-1]]
    if not np.isfinite(value):
        kept = -1
    for number, device in enumerate(moved):
        if number > kept:
            labels[device] = came_from[number]
    if kept >= 0:
        labels[moved[kept]] = first
    return max(value, 0.0) if kept >= 0 else 0.0


def child_of(partitions: Partitions, one: Labels, other: Labels, rng: np.random.Generator) -> Labels:
    """Copy five labels of `one` into `other`, then move devices of overfull stages to the first stage with room."""
    labels = other.copy()
    crossed = rng.choice(partitions.devices, CROSSED, replace=False)
    labels[crossed] = one[crossed]
    counts = np.bincount(labels, minlength=partitions.stages)
    for device in range(partitions.devices):
        if counts[labels[device]] > partitions.size:
            counts[labels[device]] -= 1
            labels[device] = int((counts < partitions.size).argmax())
            counts[labels[device]] += 1
    return labels


def genetic(
    partitions: Partitions, rng: np.random.Generator, limit_s: float, clock: Callable[[], float] = time.process_time
) -> tuple[float, int]:
    """Run the genetic search for `limit_s`. Returns the best cost, and the number of trials, at most 4,900."""
    began = clock()
    population = [partitions.drawn(rng) for _ in range(POPULATION)]
    costs = [partitions.cost_s(labels) for labels in population]
    best = min(costs)
    for trial in range(TRIALS):
        if clock() - began >= limit_s:
            return best, trial
        one, other = rng.choice(POPULATION, 2, replace=False).tolist()
        child = circular(partitions, child_of(partitions, population[one], population[other], rng))
        cost = partitions.cost_s(child)
        worse = one if costs[one] > costs[other] else other
        if cost < costs[worse]:
            population[worse], costs[worse] = child, cost
        best = min(best, cost)
    return best, TRIALS
