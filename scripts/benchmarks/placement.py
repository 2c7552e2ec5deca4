"""The planner on the five networks of the DT-FM paper, compared with random, Kernighan-Lin and its genetic search.

The cost is the paper's, in seconds: averaging plus twice the pipeline. The planner and the genetic search each have a
limit of processor time; with `--full`, the genetic search makes all of its 4,900 trials. `--large` plans networks of
256 and 1,024 devices whose links all differ, and reports the cost over time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from peerd.placement.problem import PlacementProblem
from peerd.placement.search import Plan, SearchOptions, plan
from peerd.placement.starts import random_placement
from scripts.benchmarks._placement_baselines import Partitions, genetic, kernighan_lin
from scripts.benchmarks._placement_cases import cases, large
from scripts.benchmarks._report import Figure, Report
from tests.worlds.machines.placements import arranged

SEED = 1
TARGETS_S = (3.4399, 49.5040, 16.0869, 34.8021, 49.2184)
CPU_S = 10.0  # target of the planner, and limit of the genetic search
PLANNED_S = 5.0
DRAWN = 100
KL_STARTS = 10
UNLIMITED_S = 3600.0
LARGE = ((256, 16, 120.0), (1024, 32, 600.0))  # devices, stages, limit in seconds
CURVE_S = (1, 2, 5, 10, 20, 30, 60, 120, 200, 300, 400, 600)


@dataclass(frozen=True, slots=True)
class _Timed:
    plan: Plan
    cpu_s: float


def _planned(problem: PlacementProblem, limit_s: float) -> _Timed:
    began = time.process_time()
    found = plan(problem, SearchOptions(limit_s=limit_s), Random(SEED), time.process_time)
    return _Timed(found, time.process_time() - began)


def _random_mean(problem: PlacementProblem, count: int) -> float:
    rng = Random(SEED)
    return float(np.mean([arranged(problem, random_placement(problem, rng))[1].total_s for _ in range(count)]))


def _case(name: str, problem: PlacementProblem, target_s: float, full: bool) -> tuple[list[Figure], dict[str, Any]]:
    timed, rng, partitions = _planned(problem, PLANNED_S), np.random.default_rng(SEED), Partitions(problem)
    kl = [partitions.cost_s(kernighan_lin(partitions, partitions.drawn(rng))) for _ in range(KL_STARTS)]
    evolved, trials = genetic(partitions, rng, UNLIMITED_S if full else CPU_S)
    random_mean = _random_mean(problem, DRAWN)
    cost_s, found_s = timed.plan.cost.total_s, timed.plan.trace[-1][0]
    number = name.partition("-")[0]
    figures = [
        Figure(f"cost_{number}", f"{name}: planned", cost_s, "s", 4, at_most=target_s),
        Figure(f"cpu_s_{number}", f"{name}: processor time", timed.cpu_s, "s", at_most=CPU_S),
        Figure(f"found_s_{number}", f"{name}: of that, until the last improvement", found_s, "s"),
        Figure(f"random_{number}", f"{name}: random, mean of {DRAWN}", random_mean, "s"),
        Figure(f"kl_{number}", f"{name}: Kernighan-Lin, best of {KL_STARTS} starts", min(kl), "s"),
        Figure(f"genetic_{number}", f"{name}: the paper's genetic search, {trials:,} trials", evolved, "s", 4),
    ]
    keys = {"name": name, "cost": cost_s, "cpu_s": timed.cpu_s, "random_mean": random_mean, "found_s": found_s}
    return figures, keys | {
        "kl_best": min(kl),
        "kl_mean": float(np.mean(kl)),
        "genetic": evolved,
        "genetic_trials": trials,
        "evaluations": timed.plan.evaluations,
    }


def measure(full: bool) -> Report:
    """Run the benchmark, which takes about 90 seconds; with `full`, as long as the genetic search needs."""
    found = [
        _case(case.name, case.problem(), target_s, full) for case, target_s in zip(cases(), TARGETS_S, strict=True)
    ]
    note = "seconds of communication in a step: averaging and twice the pipeline"
    return Report("placement", [figures for figures, _ in found], note, {"cases": [keys for _, keys in found]})


def _at(trace: tuple[tuple[float, float], ...], second: float) -> float:
    return [cost for when, cost in trace if when <= second or when == trace[0][0]][-1]


def measure_large() -> Report:
    """Run the large instances, which takes twelve minutes of processor time."""
    sections, curves = [], []
    for devices, stages, limit_s in LARGE:
        problem = large(devices, stages, SEED)
        timed, random_mean = _planned(problem, limit_s), _random_mean(problem, 10)
        trace, text = timed.plan.trace, f"{devices:,} devices, {stages} stages"
        section = [Figure(f"random_{devices}", f"{text}: random, mean of 10", random_mean, "s")]
        for second in (second for second in CURVE_S if second <= limit_s):
            section.append(Figure(f"cost_{devices}_{second}", f"{text}: after {second} s", _at(trace, second), "s"))
        section.append(Figure(f"cpu_s_{devices}", f"{text}: processor time", timed.cpu_s, "s", at_most=limit_s + 5))
        sections.append(section)
        curves.append({"devices": devices, "stages": stages, "evaluations": timed.plan.evaluations, "trace": trace})
    return Report("placement of many devices", sections, "seconds of communication in a step", {"curves": curves})
