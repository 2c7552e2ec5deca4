"""Pipelines in virtual time: tokens per second of a planned placement and of random ones, and their predicted costs.

Real roles, calls and averaging in virtual time, on a network with its own link for each pair: 16 devices, equally many
from each region of the paper's regional and world-wide cases, as 8 stages of 2 peers. Sizes and rates are divided by
the same factor, so that the ratio of a step's bytes to the rates is the paper's. A second factor shortens all times: it
multiplies rates and divides delays. Computing takes no time. Trainers follow the placement's routes; random placements
have random routes. Each pipeline has an equal share of a step's microbatches, all of them in flight. The planner
minimizes its steady cost, which assumes this.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Final

import msgspec
import numpy as np
import torch

from peerd.model.stage.partition import build
from peerd.placement.cost import CostKind
from peerd.placement.problem import Network, PlacementProblem, PlanDevice, StagePlacement, StageWork
from peerd.placement.search import SearchOptions, plan
from peerd.placement.starts import random_placement
from peerd.run.runfile import AveragingSection, RunFile
from scripts.benchmarks._placed_cost import WorkBytes, paper_s, paths_s
from scripts.benchmarks._placement_cases import ACTIVATION_BYTES, GRADIENT_BYTES, Case, cases
from scripts.benchmarks._report import Figure, Report
from scripts.benchmarks._virtual_pipeline import in_virtual_time, small_run
from tests.worlds.roles.placed import PlacedRun, placed_world, step_times
from tests.worlds.roles.virtualroles import Roles

SIMULATED: Final = ("4-regional", "5-world-wide")
STAGES: Final = 8
PIPELINES: Final = 2
DEVICES: Final = STAGES * PIPELINES
MICROBATCHES: Final = 5  # of each pipeline in a step
SAMPLES: Final = 2  # of a microbatch
CONTEXT: Final = 64
WIDTH: Final = 64
FASTER: Final = 40.0  # factor by which all times are shortened
RANDOM: Final = 5
WARM: Final = 1  # steps before those that are measured
EVALUATIONS: Final = 3_000  # of the planner's search
TOKENS: Final = PIPELINES * MICROBATCHES * SAMPLES * CONTEXT  # of a step


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one placement: seconds of a step in the simulation, and by two cost models."""

    step_s: float
    paths_s: float
    paper_s: float

    @property
    def tokens_per_s(self) -> float:
        return TOKENS / self.step_s


def run_file(folder: Path) -> RunFile:
    """A run of a small model in STAGES stages, on text written to `folder`."""
    run = small_run(folder, "placed", STAGES, PIPELINES * MICROBATCHES, WIDTH, CONTEXT, SAMPLES)
    return msgspec.structs.replace(run, averaging=AveragingSection(sender_timeout_s=120.0))


def work_of(run: RunFile) -> WorkBytes:
    """Bytes of a step, in float32."""
    stages = [build(run, [stage]) for stage in range(STAGES)]
    gradients = [4.0 * sum(parameter.numel() for parameter in stage.parameters()) for stage in stages]
    return WorkBytes(4.0 * SAMPLES * CONTEXT * WIDTH, MICROBATCHES, gradients)


def problem_of(case: Case, work: WorkBytes) -> PlacementProblem:
    """The case with fewer devices per region, and rates reduced by the same factor as the gradients."""
    regions = len(case.counts)
    smaller = replace(case, counts=(DEVICES // regions,) * regions)
    delay_ms, gbit_s = smaller.matrices()
    gradient = statistics.mean(work.gradients)
    delay_s, rate = delay_ms / 1e3 / FASTER, gbit_s * 1e9 / 8 * FASTER * gradient / GRADIENT_BYTES
    np.fill_diagonal(delay_s, 0.0)
    np.fill_diagonal(rate, np.inf)
    stages = (StageWork(gradient, work.activation),) * STAGES
    devices = tuple(PlanDevice(f"device{number}") for number in range(DEVICES))
    network = Network(delay_s, rate)
    return PlacementProblem(devices, network, stages, PIPELINES * MICROBATCHES, (PIPELINES,) * STAGES)


def random_routes(problem: PlacementProblem, rng: Random) -> StagePlacement:
    """A random placement with random routes."""
    placement = random_placement(problem, rng)
    members = [list(placement.members(stage)) for stage in range(STAGES)]
    for devices in members:
        rng.shuffle(devices)
    follows = [tuple(zip(here, there, strict=True)) for here, there in pairwise(members)]
    return replace(placement, follows=tuple(follows))


async def _simulate(placed: PlacedRun, steps: int, folder: Path) -> float:
    roles = Roles(run_file(folder), folder)
    async with placed_world(placed, roles, 1) as world:
        times = await step_times(world, roles, WARM + steps)
    return (times[-1] - times[WARM - 1]) / steps


def measured(placed: PlacedRun, work: WorkBytes, steps: int) -> Measured:
    return Measured(in_virtual_time(_simulate, placed, steps), paths_s(placed, work), paper_s(placed, work))


def measure(full: bool) -> Report:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="peerd-placed-") as text:
        work = work_of(run_file(Path(text)))
    sections = []
    for case in cases():
        if case.name in SIMULATED:
            sections.append(of_case(case, work, 4 if full else 1))
    scaled = ACTIVATION_BYTES / GRADIENT_BYTES * statistics.mean(work.gradients)
    note = (
        f"{STAGES} stages of {PIPELINES} devices, {TOKENS} tokens a step, times {FASTER:g} times as short; activations "
        f"of a pipeline's step are {work.activation * MICROBATCHES / scaled:.2f} of the paper's share"
    )
    return Report("placements in virtual time", sections, note)


def of_case(case: Case, work: WorkBytes, steps: int) -> list[Figure]:
    """Figures of one network."""
    problem = problem_of(case, work)
    options = SearchOptions(kind=CostKind.STEADY, evaluations=EVALUATIONS)
    planned = plan(problem, options, Random(1), time.perf_counter).placement
    placements = [planned, *(random_routes(problem, Random(seed)) for seed in range(RANDOM))]
    found = [measured(PlacedRun(problem.network, each), work, steps) for each in placements]
    planned, *others = found
    key, rates = case.name.lower(), [each.tokens_per_s for each in others]
    return [
        Figure(f"{key}_planned", f"{case.name}: planned", planned.tokens_per_s, "tokens/s", 0),
        Figure(f"{key}_random", f"  mean of {len(others)} random placements", statistics.mean(rates), "tokens/s", 0),
        Figure(f"{key}_random_least", "  the slowest of them", min(rates), "tokens/s", 0),
        Figure(f"{key}_random_most", "  the fastest of them", max(rates), "tokens/s", 0),
        Figure(f"{key}_gain", "  planned over random, simulated", _gain([each.step_s for each in found])),
        Figure(f"{key}_gain_by_paths", "  by the messages' cost", _gain([each.paths_s for each in found])),
        Figure(f"{key}_gain_by_paper", "  by the paper's cost", _gain([each.paper_s for each in found])),
        Figure(f"{key}_over_paths", "  planned: step / its messages' cost", _over_cost([planned])),
        Figure(f"{key}_random_over_paths", "  random: likewise, mean", _over_cost(others)),
    ]


def _gain(steps_s: Sequence[float]) -> float:
    """Rate of the first placement, relative to the mean rate of the others."""
    return 1 / steps_s[0] / statistics.mean(1 / each for each in steps_s[1:])


def _over_cost(found: Sequence[Measured]) -> float:
    return statistics.mean(each.step_s / each.paths_s for each in found)
