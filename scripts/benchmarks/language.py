"""Loss of a language model with experts under delay and failures: Learning@home's Figure 6, on a small scale.

Real hosts, trainers, directory and calls in virtual time; the trunk is asynchronous, and a tenth of the requests to
experts is refused. A transformer on bytes is trained on Python's standard library. Four trainers share the microbatches
in flight: 64 with 1 s each, and for the largest mixture also 16 with 0.1 s each. Each sample uses four experts, so all
models compute the same amount; in the smallest mixture each sample uses all four experts, like one dense layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from peerd.data.stream import samples_of
from peerd.run.runfile import DataSection, ModelSection, RunFile
from scripts.benchmarks._expert_swarm import FAR, GRIDS, LAYERS, NEAR, Curve, Mixture, Rates, flown, learned, report
from scripts.benchmarks._report import Figure, Report

MICROBATCHES = 600  # of all trainers together
MICROBATCHES_FULL: Final = 4000
HELD_OUT: Final = 64  # samples
RATES: Final = Rates(trunk=1e-3, experts=1e-3, microbatch=8)


def run_of(mixture: Mixture) -> RunFile:
    model = ModelSection(d_model=64, heads=4, layers=LAYERS, context=64)
    experts = {"block": "ffn1", "hidden": 64, "balance": 0.02}
    return mixture.run("language", RATES, experts, model=model, data=DataSection(path="stdlib", shuffle_buffer=1000))


def curve(mixture: Mixture) -> Curve:
    """Train one mixture. Returns the curve of its held-out loss in nats per byte."""
    torch.set_num_threads(1)
    run = run_of(mixture)
    return mixture.learn(run, partial(_loss, run, samples_of(run, "judge", "valid").take(HELD_OUT).long()))


@torch.no_grad()
def _loss(run: RunFile, samples: Tensor, trunk: Any, experts: Any) -> float:
    return flown(run, trunk, experts, samples[:, :-1], samples[:, 1:]).loss() / len(samples)


def measure(full: bool) -> Report:
    microbatches = MICROBATCHES_FULL if full else MICROBATCHES
    mixtures = [*(Mixture(experts, FAR, microbatches) for experts in GRIDS), Mixture(max(GRIDS), NEAR, microbatches)]
    figures, curves = [], learned(curve, mixtures)
    for mixture, found in curves.items():
        key = f"dmoe{mixture.experts}_{mixture.weather.in_flight}"
        text = f"DMoE-{mixture.experts}, {mixture.weather.text}: held-out loss"
        figures += [Figure(f"{key}_loss", text, found.end, "nats", 3), *found.staleness(key)]
    return report("a language model under delay", [figures], curves)
