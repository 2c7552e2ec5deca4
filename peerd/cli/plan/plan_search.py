"""Searches for the best placement, given a links file and, optionally, a run and an earlier placement.

The search has a time limit. Ctrl+C ends it with the best placement so far: the search's clock jumps to its end. If no
placement is possible, ConfigError names the file, the line, and what is allowed.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import FrameType
from typing import Final

import numpy as np

from peerd.cli.plan.links_file import LoadedLinks, load_links
from peerd.cli.plan.placement_file import load_placement
from peerd.cli.plan.plan_report import SolvedPlan
from peerd.core.errors import ConfigError
from peerd.log import clean
from peerd.model.shapes.model_size import StageSize, microbatches
from peerd.placement.cost import CostKind
from peerd.placement.problem import NoPlacement, PlacementProblem, StagePlacement, StageWork
from peerd.placement.search import SearchOptions, cost_of, plan
from peerd.placement.starts import random_placement
from peerd.run.runfile import RunFile
from peerd.screen.units import size

RANDOM: Final = 20  # random placements to compare with
RANDOM_OF_MANY: Final = 5  # likewise, for more than MANY devices
MANY: Final = 256
STATE_GRADIENTS: Final = 3  # state that a moving device fetches, in gradients: parameters and two moments
_LEAP_S: Final = 1e9
_TOLD_S: Final = 0.2  # between two updates of the progress line


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Options of one search, from the command line."""

    links: Path
    run: tuple[Path, RunFile, Sequence[StageSize]] | None
    before: Path | None
    kind: CostKind
    seconds: float
    seed: int
    horizon_steps: int


def find(wish: PlanRequest) -> SolvedPlan:
    """Read the files, search a placement, and compare it with others. Raises ConfigError if no placement exists."""
    links = load_links(wish.links)
    problem, state_bytes = problem_of(links, wish)
    before = (wish.before, load_placement(wish.before, problem)) if wish.before is not None else None
    if not timed(problem):
        problem = replace(problem, sizes=_settled_sizes(problem, before[1] if before else None))
    moving_s = _moving_s(problem, state_bytes) if before is not None else 0.0
    options = SearchOptions(kind=wish.kind, limit_s=wish.seconds, moving_s=moving_s, horizon_steps=wish.horizon_steps)
    began = time.monotonic()
    with _stoppable(wish.seconds) as watch:
        try:
            best = plan(problem, options, Random(wish.seed), watch.clock, before[1] if before else None)
        except NoPlacement as error:
            settled = problem.sizes is not None and len(problem.devices) > len(problem.stages)
            free = "; if all devices have speed_tflops, stages may have unequal numbers of them" if settled else ""
            raise ConfigError(f"{wish.links}: {error}{free}") from error
    took_s = time.monotonic() - began
    count = RANDOM if len(problem.devices) <= MANY else RANDOM_OF_MANY
    rng = Random(wish.seed)
    return SolvedPlan(
        links=str(wish.links),
        problem=problem,
        placement=best.placement,
        cost=best.cost,
        seed=wish.seed,
        took_s=took_s,
        stopped=watch.stopped,
        optimal=best.optimal,
        random=[cost_of(problem, random_placement(problem, rng), wish.kind).total_s for _ in range(count)],
        before=(str(before[0]), before[1], cost_of(problem, before[1], wish.kind)) if before is not None else None,
    )


def problem_of(links: LoadedLinks, wish: PlanRequest) -> tuple[PlacementProblem, float]:
    """The problem to solve, and the bytes of state that a device fetches when it moves to another stage."""
    if wish.run is not None:
        path, run, sizes = wish.run
        stages = tuple(StageWork(one.gradient_bytes, one.sent_bytes, one.flops, one.memory_bytes) for one in sizes)
        count, state = microbatches(run), float(max(one.footprint.checkpoint_bytes for one in sizes))
        where = f"{path}: pipeline.stages"
    else:
        stages, count = links.stages, links.microbatches
        if not stages:
            raise ConfigError(
                f"{links.path} has no workload; add --model RUN.yaml to the command, or `workload:` to the file"
            )
        state = STATE_GRADIENTS * max(work.gradient for work in stages)
        where = f"{links.path}, line {links.workload_line}: workload.stages"
    devices = links.devices
    if len(stages) > len(devices):
        raise ConfigError(
            f"{where} is {len(stages)}, and {links.path} has {len(devices)} devices; allowed: one for each stage"
        )
    _need_memory(links, stages, where)
    return PlacementProblem(devices, links.network, stages, count), state


def timed(problem: PlacementProblem) -> bool:
    """True if the work of the stages and the speeds of all devices are known.

    Otherwise a second device in a stage has no benefit by the cost, so the stages' sizes are fixed before the search.
    """
    return any(work.flops for work in problem.stages) and all(math.isfinite(device.speed) for device in problem.devices)


def _settled_sizes(problem: PlacementProblem, before: StagePlacement | None) -> tuple[int, ...]:
    """Number of devices of each stage: as in the placement `before`, or all devices in equal parts."""
    count, stages = len(problem.devices), len(problem.stages)
    if before is not None:
        return tuple(len(before.members(stage)) for stage in range(stages))
    return tuple(count // stages + (stage < count % stages) for stage in range(stages))


def _need_memory(links: LoadedLinks, stages: Sequence[StageWork], where: str) -> None:
    """Raise ConfigError unless each stage can have a device with enough memory. Compares both sorted by memory."""
    wanting = sorted(range(len(stages)), key=lambda stage: -stages[stage].memory)
    having = sorted(links.devices, key=lambda device: -device.memory)
    for nth, (stage, device) in enumerate(zip(wanting, having, strict=False)):
        need = stages[stage].memory
        if device.memory < need:
            file = where.rpartition(": ")[0]
            most = f"the largest device, {clean(device.name)}, has {size(device.memory)}"
            if nth:
                most = f"only {nth} of the devices have as much, for {nth + 1} stages that need it"
            more = "devices with more memory_gb, or more, smaller stages"
            raise ConfigError(f"{file}: stage {stage} needs {size(need)} of memory, and {most}; allowed: {more}")


def _moving_s(problem: PlacementProblem, state_bytes: float) -> float:
    """Seconds that a device takes to fetch a stage's state over a link of median rate."""
    rate = problem.network.rate[np.isfinite(problem.network.rate) & (problem.network.rate > 0)]
    return float(state_bytes / np.median(rate)) if len(rate) else 0.0


class SearchWatch:
    """Clock of a search. Prints the progress, and jumps to the end of the search when the user stops it."""

    def __init__(self, limit_s: float) -> None:
        self.stopped = False
        self._leaps = 0
        self.began = time.monotonic()
        self._limit_s = limit_s
        self._told_s = 0.0
        self._tell = sys.stderr.isatty()

    def clock(self) -> float:
        """Current time in seconds. Once stopped, each call adds _LEAP_S to it, so that every deadline passes."""
        if self.stopped:
            self._leaps += 1
            return time.monotonic() + self._leaps * _LEAP_S
        now = time.monotonic()
        if self._tell and now - self.began >= self._told_s:
            self._told_s += _TOLD_S
            gone = f"{now - self.began:.0f} of {self._limit_s:g} s"
            sys.stderr.write(f"\rsearching: {gone}; Ctrl+C ends the search with the best plan so far ")
            sys.stderr.flush()
        return now

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handler of SIGINT. The first call ends the search, the second one the program."""
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True

    def end(self) -> None:
        """Erase the progress line."""
        if self._tell:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextlib.contextmanager
def _stoppable(limit_s: float) -> Iterator[SearchWatch]:
    """Context in which Ctrl+C stops the watch instead of the program."""
    watch = SearchWatch(limit_s)
    usual = signal.signal(signal.SIGINT, watch.stop)
    try:
        yield watch
    finally:
        signal.signal(signal.SIGINT, usual)
        watch.end()
