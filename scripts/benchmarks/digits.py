"""Accuracy of mixtures of experts on digits under delays and failures: Learning@home's Figure 5.

Real hosts, trainers, directory and calls in virtual time; the trunk is asynchronous, and a tenth of the requests to
experts is refused. Low delay: 16 microbatches in flight, 0.1 s each; high delay: 64, 1 s each; four trainers share
them. Only the trunk's layers and the samples are specific to this benchmark (`_digit_trunk`). `--full` also measures
mixtures of 4 and 16 experts per layer, besides 64.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch

from peerd.run.runfile import DataSection, ModelSection, RunFile
from scripts.benchmarks._digit_trunk import PIXELS, DigitTrainer, accuracy, digit_trunks, digits
from scripts.benchmarks._expert_swarm import FAR, GRIDS, LAYERS, NEAR, Curve, Mixture, Rates, Weather, learned, report
from scripts.benchmarks._report import Figure, Report

MICROBATCHES = 3000  # of all trainers together
SIZES = (64,)  # experts of each layer
LOST_AT_MOST: Final = 2.0  # percentage points, with 64 experts and high delay
RATES: Final = Rates(trunk=1e-3, experts=3e-4, microbatch=32)


def run_of(mixture: Mixture) -> RunFile:
    model = ModelSection(d_model=32, heads=1, layers=LAYERS, context=PIXELS)
    # Balance is scaled, as the loss is a mean over 64 tokens of which only one counts.
    experts = {"hidden": 32, "balance": 0.05 / PIXELS}
    return mixture.run("digits", RATES, experts, model=model, data=DataSection(shuffle_buffer=1))


def curve(mixture: Mixture) -> Curve:
    """Train one mixture. Returns the curve of its accuracy in percent."""
    torch.set_num_threads(1)
    train, test = digits()
    with digit_trunks():
        run, trainer = run_of(mixture), type("OneTrainer", (DigitTrainer,), {"samples": train})
        return mixture.learn(run, partial(accuracy, run, test=test), trainer)


def measure(full: bool) -> Report:
    sizes = sorted(GRIDS) if full else SIZES
    curves = learned(curve, [Mixture(experts, one, MICROBATCHES) for experts in sizes for one in (NEAR, FAR)])
    sections = [
        _figures(experts, {one.weather: found for one, found in curves.items() if one.experts == experts})
        for experts in sizes
    ]
    return report("digits under delay", sections, curves)


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
