"""Speed of a swarm on one machine, compared with plain torch on the same cores.

Two models: the demo's, and one twenty times as large. `torch`: one process that makes the same steps on all cores, one
microbatch at a time or the whole batch at once, whichever is faster. `pipeline`: a backbone, two stages of one peer and
a trainer. `replicas`: a backbone and two trainers, each with the whole model. Each peer is a `peerd` process with one
thread. Speed is that of the median step after warm-up; `cores` is the number of cores that the swarm's processes kept
busy. Since a machine's speed changes within minutes, torch is measured before and after each swarm.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from peerd.core.decoders import convert
from peerd.data.stream import samples_of
from peerd.run.runfile import RunFile
from scripts.benchmarks._report import Figure, Report
from scripts.plain_torch import PlainTraining, median_step_s
from scripts.process_swarm import BASE, CORES, ProcessSwarm

MODELS: Final[dict[str, dict[str, int]]] = {
    "small": {"d_model": 96, "heads": 3, "layers": 2, "context": 128},
    "large": {"d_model": 336, "heads": 6, "layers": 4, "context": 128},
}
MICROBATCH, MICROBATCHES = 4, 8
WARM_STEPS: Final = 3
LEAST: Final = 0.8  # target for the larger model, relative to torch's speed


def run_file(model: str, stages: int) -> dict[str, Any]:
    return BASE | {
        "run": f"onemachine-{model}",
        "model": MODELS[model],
        "pipeline": {"stages": stages, "microbatch": MICROBATCH},
        "optimizer": {"name": "adamw", "lr": 3.0e-3, "total_steps": 10_000},
        "batch": {"target_samples": MICROBATCH * MICROBATCHES},
    }


def step_tokens(model: str) -> int:
    return MICROBATCH * MICROBATCHES * MODELS[model]["context"]


def torch_tokens_s(model: str, steps: int) -> float:
    """Tokens per second of one process on all cores, by its median step, with the faster way to compute a batch."""
    run = convert(run_file(model, 1), RunFile)
    stream = samples_of(run, "plain")
    batches = [stream.take(MICROBATCH * MICROBATCHES) for _ in range(WARM_STEPS)]
    before = torch.get_num_threads()
    torch.set_num_threads(CORES)
    try:
        times = [median_step_s(PlainTraining(run), batches, parts, WARM_STEPS, steps) for parts in (MICROBATCHES, 1)]
    finally:
        torch.set_num_threads(before)
    return step_tokens(model) / min(times)


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one swarm."""

    tokens_per_s: float
    cores: float


def swarm_of(model: str, kind: str, steps: int) -> Measured:
    """Start a swarm of this kind, and measure `steps` steps after warm-up."""
    run = run_file(model, 2 if kind == "pipeline" else 1)
    with (
        tempfile.TemporaryDirectory(prefix="peerd-onemachine-") as folder,
        ProcessSwarm(Path(folder), run) as swarm,
    ):
        if kind == "pipeline":
            swarm.start_pipeline()
        else:
            swarm.start_backbone()
            for number in range(2):
                swarm.join(f"trainer-{number}", "trainer")
        (found,) = swarm.measure(WARM_STEPS, steps)
    return Measured(step_tokens(model) / found.median_s, CORES * found.cpu_share)


def measure(full: bool) -> Report:
    sections = []
    extra: dict[str, Any] = {}
    for model in MODELS:
        steps = (60 if model == "small" else 20) * (3 if full else 1)
        plain, found = [torch_tokens_s(model, 10)], {}
        for kind in ("pipeline", "replicas"):
            found[kind] = swarm_of(model, kind, steps)
            plain.append(torch_tokens_s(model, 10))
        base = statistics.median(plain)
        extra[model] = {"torch_tokens_s": base} | {f"{kind}_tokens_s": one.tokens_per_s for kind, one in found.items()}
        sections.append([*_section(model, base, found)])
    return Report("one machine", sections, f"{CORES} cores, {MICROBATCHES} microbatches of {MICROBATCH} a step", extra)


def _section(model: str, base: float, found: dict[str, Measured]) -> Iterator[Figure]:
    yield Figure(f"{model}_torch", f"{model}: plain torch, tokens a second", base, "", 0)
    for kind, one in found.items():
        least = LEAST if model == "large" else None
        yield Figure(f"{model}_{kind}", f"  {kind}", one.tokens_per_s, "", 0)
        yield Figure(f"{model}_{kind}_share", "    over torch", one.tokens_per_s / base, "", 2, at_least=least)
        yield Figure(f"{model}_{kind}_cores", "    cores kept busy", one.cores, "", 2)
