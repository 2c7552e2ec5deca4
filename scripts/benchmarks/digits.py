"""Accuracy of mixtures of experts on digits under delays and failures: Learning@home's Figure 5.

Real hosts, trainers, directory and calls in virtual time; the trunk is asynchronous, and a tenth of the requests to
experts is refused. Low delay: 16 microbatches in flight, 0.1 s each; high delay: 64, 1 s each; four trainers share
them. Only the trunk's layers and the samples are specific to this benchmark (`_digit_trunk`). `--full` also measures
mixtures of 4 and 16 experts per layer, besides 64.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import torch

from peerd.core.run.runfile import DataSection, ModelSection, RunFile
from peerd.sim.clock import run_virtual
from scripts.benchmarks._digit_trunk import PIXELS, DigitTrainer, accuracy, digit_trunks, digits
from scripts.benchmarks._expert_swarm import FAR, GRIDS, LAYERS, NEAR, Curve, ExpertSwarm, Rates, Weather, run_of
from scripts.benchmarks._report import Figure, Report

MICROBATCHES = 3000  # of all trainers together
SIZES = (64,)  # experts of each layer
LOOKS: Final = 20
LOST_AT_MOST: Final = 2.0  # percentage points, with 64 experts and high delay
RATES: Final = Rates(trunk=1e-3, experts=3e-4, microbatch=32)


@dataclass(frozen=True, slots=True)
class Case:
    """One mixture under given conditions. `microbatches` counts those of all trainers together."""

    experts: int
    weather: Weather
    microbatches: int
    seed: int = 1
    rates: Rates = RATES

    def run(self) -> RunFile:
        """The run file of the case."""
        sections: dict[str, Any] = {
            "seed": self.seed,
            "model": ModelSection(d_model=32, heads=1, layers=LAYERS, context=PIXELS),
            "data": DataSection(shuffle_buffer=1),
            "experts": {
                "hidden": 32,
                "balance": 0.05 / PIXELS,
            },  # scaled, as the loss is a mean over 64 tokens of which only one counts
        }
        return run_of("digits", GRIDS[self.experts], self.weather, self.rates, **sections)


def curve(case: Case) -> Curve:
    """Train one case. Returns the curve of its accuracy in percent."""
    torch.set_num_threads(1)
    train, test = digits()
    with tempfile.TemporaryDirectory() as folder, digit_trunks():
        run, trainer = case.run(), type("OneTrainer", (DigitTrainer,), {"samples": train})
        judge = partial(accuracy, run, test=test)
        found = ExpertSwarm(run, case.weather, Path(folder), judge, trainer)
        return run_virtual(found.learn, case.microbatches, min(LOOKS, case.microbatches), seed=case.seed)


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
        "curves": {f"{case.experts} {case.weather.text}": [found.at, found.values] for case, found in curves.items()},
        "microbatches": MICROBATCHES,
    }
    note = "in virtual time: real roles, hosts, directory and calls; a tenth of the requests to experts is refused"
    return Report("digits under delay", sections, note, extra)


def _figures(experts: int, found: dict[Weather, Curve]) -> list[Figure]:
    """Figures of one mixture."""
    figures = []
    for weather, one in found.items():
        key = f"dmoe{experts}_{weather.in_flight}"
        figures.append(Figure(f"{key}_accuracy", f"DMoE-{experts}, {weather.text}: accuracy", one.end, "%", 1))
        figures += one.staleness(key)
    lost = found[NEAR].end - found[FAR].end
    most = LOST_AT_MOST if experts == max(GRIDS) else None
    return [*figures, Figure(f"dmoe{experts}_lost", "  points lost by the high delay", lost, digits=2, at_most=most)]
