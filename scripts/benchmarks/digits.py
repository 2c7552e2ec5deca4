"""Accuracy of mixtures of experts on digits under delays and failures: Learning@home's Figure 5.

Real hosts, trainers, directory and calls in virtual time; the trunk is asynchronous, and a tenth of the requests to
experts is refused. Low delay: 16 microbatches under way, 0.1 s each; high delay: 64, 1 s each. Four trainers share
them. Only the trunk's layers and the samples are the benchmark's own (`_digit_trunk`). `--full`: mixtures of 4 and 16
experts a layer besides 64.
"""

from __future__ import annotations

import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import torch

from benchmarks._digit_swarm import FAR, GRIDS, NEAR, Curve, DigitSwarm, Weather, run_of
from benchmarks._digit_trunk import digit_trunks, digits
from benchmarks._report import Figure, Report
from peerd.sim.clock import run_virtual

MICROBATCHES = 3000  # of all trainers together
SIZES = (64,)  # experts of each layer
LOOKS: Final = 20
TAIL: Final = 5  # looks at the end, over which a result is the mean
LOST_AT_MOST: Final = 2.0  # points, by 64 experts under the high delay
WORDS: Final = {NEAR: "16 under way, 0.1 s", FAR: "64 under way, 1 s"}


@dataclass(frozen=True, slots=True)
class Case:
    """One mixture under one weather. `microbatches`: those of all trainers together."""

    experts: int
    weather: Weather
    microbatches: int
    seed: int = 1


def curve(case: Case) -> Curve:
    """The accuracy of one case while it learns."""
    torch.set_num_threads(1)
    train, test = digits()
    with tempfile.TemporaryDirectory() as folder, digit_trunks():
        run = run_of(case.experts, case.weather, case.seed)
        found = DigitSwarm(run, case.weather, Path(folder), train, test)
        return run_virtual(found.learn, case.microbatches, min(LOOKS, case.microbatches), seed=case.seed)


def end(found: Curve) -> float:
    """The result of a curve, in percent."""
    return statistics.mean(found.values[-TAIL:])


def measure(full: bool) -> Report:
    sizes = sorted(GRIDS) if full else SIZES
    cases = [Case(experts, weather, MICROBATCHES) for experts in sizes for weather in (NEAR, FAR)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        curves = dict(zip(cases, pool.map(curve, cases), strict=True))
    sections = [
        _figures(experts, {case.weather: curves[case] for case in cases if case.experts == experts})
        for experts in sizes
    ]
    extra = {
        "curves": {f"{case.experts} {WORDS[case.weather]}": [found.at, found.values] for case, found in curves.items()},
        "microbatches": MICROBATCHES,
    }
    note = "in virtual time: real roles, hosts, directory and calls; a tenth of the requests to experts is refused"
    return Report("digits under delay", sections, note, extra)


def _figures(experts: int, found: dict[Weather, Curve]) -> list[Figure]:
    """Figures of one mixture."""
    figures = []
    for weather, one in found.items():
        key, told = f"dmoe{experts}_{weather.in_flight}", [trainer["experts"] for trainer in one.told]
        figures.append(Figure(f"{key}_accuracy", f"DMoE-{experts}, {WORDS[weather]}: accuracy", end(one), "%", 1))
        stale = statistics.mean(trainer["staleness"]["mean"] for trainer in told)
        figures.append(Figure(f"{key}_expert_stale", "  updates of others while it waits", stale, digits=1))
        behind = statistics.mean(trainer["trunk_staleness"]["mean"] for trainer in told)
        figures.append(Figure(f"{key}_trunk_stale", "  steps that the trunk's gradients are old", behind, digits=1))
    lost = end(found[NEAR]) - end(found[FAR])
    most = LOST_AT_MOST if experts == max(GRIDS) else None
    return [*figures, Figure(f"dmoe{experts}_lost", "  points lost by the high delay", lost, digits=2, at_most=most)]
