"""Loss of a language model with experts under delay and failures: Learning@home's Figure 6, on a small scale.

Real hosts, trainers, directory and calls in virtual time; the trunk is asynchronous, and a tenth of the requests to
experts is refused. A transformer on bytes is trained on Python's standard library. Four trainers share the microbatches
in flight: 64 with 1 s each, and for the largest mixture also 16 with 0.1 s each. Each sample uses four experts, so all
models compute the same amount; in the smallest mixture each sample uses all four experts, like one dense layer.
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
from torch import Tensor

from peerd.compute.data.stream import samples_of
from peerd.core.run.runfile import DataSection, ModelSection, RunFile
from peerd.sim.clock import run_virtual
from scripts.benchmarks._expert_swarm import FAR, GRIDS, LAYERS, NEAR, Curve, ExpertSwarm, Rates, Weather, flown, run_of
from scripts.benchmarks._report import Figure, Report

MICROBATCHES = 600  # of all trainers together
MICROBATCHES_FULL: Final = 4000
LOOKS: Final = 20
HELD_OUT: Final = 64  # samples
RATES: Final = Rates(trunk=1e-3, experts=1e-3, microbatch=8)


@dataclass(frozen=True, slots=True)
class Mixture:
    """One model under given conditions. `microbatches` counts those of all trainers together."""

    experts: int
    weather: Weather
    microbatches: int
    seed: int = 1

    def run(self) -> RunFile:
        """The run file of the model."""
        sections: dict[str, Any] = {
            "seed": self.seed,
            "model": ModelSection(d_model=64, heads=4, layers=LAYERS, context=64),
            "data": DataSection(path="stdlib", shuffle_buffer=1000),
            "experts": {"block": "ffn1", "hidden": 64, "balance": 0.02},
        }
        return run_of("language", GRIDS[self.experts], self.weather, RATES, **sections)


def curve(mixture: Mixture) -> Curve:
    """Train one model. Returns the curve of its held-out loss in nats per byte."""
    torch.set_num_threads(1)
    run = mixture.run()
    samples = samples_of(run, "judge", "validation").take(HELD_OUT).long()
    with tempfile.TemporaryDirectory() as folder:
        swarm = ExpertSwarm(run, mixture.weather, Path(folder), partial(_loss, run, samples))
        return run_virtual(swarm.learn, mixture.microbatches, min(LOOKS, mixture.microbatches), seed=mixture.seed)


@torch.no_grad()
def _loss(run: RunFile, samples: Tensor, trunk: Any, experts: Any) -> float:
    return flown(run, trunk, experts, samples[:, :-1], samples[:, 1:]).loss() / len(samples)


def measure(full: bool) -> Report:
    microbatches = MICROBATCHES_FULL if full else MICROBATCHES
    mixtures = [Mixture(experts, FAR, microbatches) for experts in GRIDS]
    mixtures.append(Mixture(max(GRIDS), NEAR, microbatches))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        curves = dict(zip(mixtures, pool.map(curve, mixtures), strict=True))
    figures = []
    for mixture, found in curves.items():
        key = f"dmoe{mixture.experts}_{mixture.weather.in_flight}"
        text = f"DMoE-{mixture.experts}, {mixture.weather.text}: held-out loss"
        figures += [Figure(f"{key}_loss", text, found.end, "nats", 3), *found.staleness(key)]
    extra = {
        "curves": {f"{one.experts} {one.weather.text}": [found.at, found.values] for one, found in curves.items()},
        "microbatches": microbatches,
    }
    note = "in virtual time: real roles, hosts, directory and calls; a tenth of the requests to experts is refused"
    return Report("a language model under delay", [figures], note, extra)
