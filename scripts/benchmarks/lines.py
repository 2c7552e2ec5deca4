"""A pipeline on slow lines: the speed gained by coding activations, and its effect on the loss.

Each peer (a backbone, one peer per stage, a trainer) is a `peerd` process on its own host in a network lab, behind a
line of 100 Mb/s up and down. The same run is made once for each code, with the same seed, samples, number of steps and
initial parameters. `none` is fp32; lossless packing is used only if `auto` chooses it. Speed is that of the median
global step after warm-up; the loss is that of held-out samples after the last step. The model is so small that the
lines limit the speed, as for a real model on GPUs; the reported shares show this. Other load on the machine slows down
the fast runs. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks._report import Figure, Report
from scripts.lab import Lab, why_not
from scripts.process_swarm import BASE, CORES, ProcessSwarm

WHY_NOT = why_not
RATE_MBIT = 100.0
RUN: dict[str, Any] = BASE | {
    "run": "lines",
    "model": {"d_model": 48, "heads": 1, "layers": 3, "context": 32},
    "pipeline": {"stages": 3, "microbatch": 128},
    "optimizer": {"name": "adamw", "lr": 5.0e-3, "warmup_steps": 4},
    "batch": {"target_samples": 1024},
    "evaluate": {"every_steps": 1000, "samples": 512},
    "limits": {"microbatches_in_flight": 10},
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the measurement."""

    codes: Sequence[str]  # the first is the baseline, the second has targets
    warm_steps: int  # before the measurement
    steps: int  # in it


QUICK = Sizes(("none", "dynamic8", "auto"), warm_steps=3, steps=14)
FULL = Sizes(("none", "dynamic8", "auto", "bf16", "int8", "fp8-e4m3", "nf4", "int4"), warm_steps=4, steps=40)


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one run."""

    tokens_per_s: float  # in the median step
    wire_bytes_per_token: float  # sent by all hosts together
    line_share: float  # use of the busiest line in its busier direction, as a share of its rate
    cpu_share: float  # of all cores, by the swarm's processes
    others_share: float  # of all cores, by everything else, including the kernel's network
    loss: float  # nats per token


def run_file(code: str, steps: int) -> dict[str, Any]:
    run = copy.deepcopy(RUN)
    run["pipeline"]["boundary"] = {"code": code, "lossless": "auto" if code == "auto" else "never"}
    run["optimizer"]["total_steps"] = steps
    return run


def measured(code: str, sizes: Sizes, rate_mbit: float = RATE_MBIT) -> Measured:
    """Measure one run with this code, from its start to the final loss."""
    run = run_file(code, sizes.warm_steps + sizes.steps + 1)
    with tempfile.TemporaryDirectory(prefix="peerd-lines-") as folder, Lab() as lab:
        swarm = ProcessSwarm(Path(folder), run, lambda name: lab.host(name, rate_mbit, rate_mbit))
        swarm.start_pipeline()
        (found,) = swarm.measure(sizes.warm_steps, sizes.steps)
        loss = last_loss(swarm, sizes.warm_steps + sizes.steps + 1)
    step_tokens = run["batch"]["target_samples"] * run["model"]["context"]
    busiest = max(max(each.sent, each.received) for each in found.crossed.values())
    return Measured(
        tokens_per_s=step_tokens / found.median_s,
        wire_bytes_per_token=found.sent / sizes.steps / step_tokens,
        line_share=busiest * 8e-6 / found.seconds / rate_mbit,
        cpu_share=found.cpu_share,
        others_share=found.others_share,
        loss=loss,
    )


def last_loss(swarm: ProcessSwarm, step: int) -> float:
    """Validation loss after the run's last step."""
    found: list[float] = []

    def evaluated() -> bool:
        events = [event for peer in swarm.peers for event in peer.events()]
        found[:] = [e["loss"] for e in events if e["name"] == "trainer.evaluated" and e["step"] == step]
        return bool(found)

    swarm.until(evaluated, f"no loss was logged after step {step}")
    return found[0]


def section(code: str, found: Measured, base: Measured, target: bool) -> list[Figure]:
    figures = [
        Figure(f"{code}_tokens_per_s", f"{code}: tokens per second", found.tokens_per_s, "", 0),
        Figure(f"{code}_wire_bytes_per_token", "bytes on all lines", found.wire_bytes_per_token, "B/token", 1),
        Figure(f"{code}_line_share", "share of its rate that the busiest line carried", found.line_share),
        Figure(f"{code}_cpu_share", f"processor time, share of {CORES} cores", found.cpu_share),
        Figure(f"{code}_others_share", "the same, of everything else on this machine", found.others_share),
        Figure(f"{code}_loss", "validation loss after the last step", found.loss, "nats", 4),
    ]
    if found is not base:
        speedup, worse = found.tokens_per_s / base.tokens_per_s, abs(found.loss / base.loss - 1)
        figures += [
            Figure(f"{code}_speedup", f"speed over {QUICK.codes[0]}", speedup, at_least=3.5 if target else None),
            Figure(f"{code}_loss_difference", "loss differs by", worse, "", 4, at_most=0.02 if target else None),
        ]
    return figures


def measure(full: bool) -> Report:
    sizes = FULL if full else QUICK
    found = {code: measured(code, sizes) for code in sizes.codes}
    base = found[sizes.codes[0]]
    sections = [section(code, each, base, code == sizes.codes[1]) for code, each in found.items()]
    model, batch = RUN["model"], RUN["batch"]["target_samples"] * RUN["model"]["context"]
    note = (
        f"{RATE_MBIT:g} Mb/s lines, {RUN['pipeline']['stages']} stages of one layer, d_model {model['d_model']}, "
        f"{batch:,} tokens a step, {sizes.steps} steps measured"
    )
    return Report("lines", sections, note)
