"""Speed and loss of replicas with delayed updates on slow lines, where averaging takes as long as computing.

Two `peerd` processes with one thread each hold a replica, each on its own host in a network lab. `alone`: each trains
its own run with half the batch, both at the same time, which gives the speed without averaging. Then both train one run
behind lines on which averaging takes as long as computing. `synchronous`: a step computes and then averages, so it
takes twice as long as alone. `delayed`: a step averages while the next one is computed. The rate of the lines is set in
two steps: first so that sending the gradient takes as long as computing a batch, then corrected by the measured
averaging time; `averaging over computing` shows the result. All runs have the same seed. Since the machine's speed
changes within minutes, `alone` is measured before and after the others, and the mean counts. `others` is the share of
the processor used by everything else. `busy` is the share of the time in which the replicas computed; it is low if they
wait for the line.

The loss is measured separately (`_staleness`), with all gradients one step old, which is the worst case. Needs Linux,
root and iproute2.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks._report import Figure, Report
from scripts.benchmarks._staleness import Losses, compared
from scripts.lab import Lab, why_not
from scripts.peerd_process import PeerdProcess
from scripts.process_swarm import BASE, ProcessSwarm

WHY_NOT = why_not
REPLICAS = 2
OVERHEAD = 1.05  # bytes sent per byte of gradient, with Ethernet, IP, TCP and peerd's protocols
RUN: dict[str, Any] = BASE | {
    "run": "delayed",
    "model": {"d_model": 96, "heads": 2, "layers": 4, "context": 64},
    "pipeline": {"stages": 1, "microbatch": 8},
    "optimizer": {"name": "adamw", "lr": 2.0e-3, "warmup_steps": 4},
    "batch": {"target_samples": 512},
    "averaging": {"part_bytes": 65536},
}
VALUES = 4 * (12 * 96**2 + 2 * 96) + 2 * 256 * 96  # approximate length of the gradient


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of steps to measure, after two warm-up steps."""

    alone: int
    synchronous: int
    delayed: int
    loss_steps: int
    orders: int  # of samples, for the loss


QUICK = Sizes(alone=8, synchronous=6, delayed=16, loss_steps=400, orders=3)
FULL = Sizes(alone=12, synchronous=12, delayed=24, loss_steps=800, orders=4)
WARM = 2


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one run."""

    step_s: float  # median
    tokens_per_s: float  # by all replicas
    busy: float  # share of the time in which they computed
    others_share: float  # of the processor, by everything else


def run_file(delayed: bool) -> dict[str, Any]:
    run = copy.deepcopy(RUN)
    run["optimizer"]["delayed"] = delayed
    return run


def halves() -> list[dict[str, Any]]:
    """Two independent runs, each with half the batch."""
    runs = [run_file(False) for _ in range(REPLICAS)]
    for number, run in enumerate(runs):
        run["run"] += f"-{number}"
        run["batch"]["target_samples"] //= REPLICAS
    return runs


def measured(runs: list[dict[str, Any]], rate_mbit: float | None, steps: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="peerd-delayed-") as folder, Lab() as lab:
        swarm = ProcessSwarm(Path(folder), place=lambda name: lab.host(name, rate_mbit, rate_mbit))
        swarm.start_backbone()
        replicas = [swarm.join(f"replica-{number}", "trainer", run=run) for number, run in enumerate(runs)]
        for peer in replicas:
            swarm.wait_for_step(WARM, 120, peer)
        begun = [computed(peer) for peer in replicas]
        found = swarm.measure(WARM, steps, 600, *replicas)
        ended = [computed(peer) for peer in replicas]
    tokens = steps * RUN["batch"]["target_samples"] / REPLICAS * RUN["model"]["context"]  # of each
    busy = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in zip(begun, ended, strict=True)]
    return Measured(
        step_s=statistics.median(seconds for each in found for seconds in each.steps_s),
        tokens_per_s=sum(tokens / each.seconds for each in found),
        busy=statistics.mean(busy),
        others_share=statistics.mean(each.others_share for each in found),
    )


def mean(found: Sequence[Measured]) -> Measured:
    """Mean of several measurements of the same run."""
    return Measured(*(statistics.mean(values) for values in zip(*map(astuple, found), strict=True)))


def line_mbit(alone: Measured) -> float:
    """Rate in Mb/s of a line that transfers a gradient in the time in which a step is computed."""
    return VALUES * 32e-6 * OVERHEAD / alone.step_s


def averaging_over_computing(synchronous: Measured, alone: Measured) -> float:
    """Averaging time of a step of the synchronous run, divided by its computing time."""
    return synchronous.step_s / alone.step_s - 1


def computed(peer: PeerdProcess) -> tuple[float, float]:
    """Seconds that a replica has computed so far, and the current time."""
    status = peer.status()
    (replica,) = (role["replica"] for role in status["roles"] if "replica" in role)
    return replica["samples"] / max(replica["samples_per_s"], 1e-9), status["time"]


def measure(full: bool) -> Report:
    sizes = FULL if full else QUICK
    alone = measured(halves(), None, sizes.alone)
    tried_mbit = line_mbit(alone)
    tried = measured([run_file(False)] * REPLICAS, tried_mbit, sizes.synchronous)
    rate_mbit = tried_mbit * averaging_over_computing(tried, alone)
    synchronous = measured([run_file(False)] * REPLICAS, rate_mbit, sizes.synchronous)
    delayed = measured([run_file(True)] * REPLICAS, rate_mbit, sizes.delayed)
    alone = mean([alone, measured(halves(), None, sizes.alone)])
    losses = compared(sizes.loss_steps, sizes.orders)
    share = averaging_over_computing(synchronous, alone)
    averaging = Figure("averaging_over_computing", "averaging over computing", share)
    sections = [
        section("alone", alone, alone),
        [*section("synchronous", synchronous, alone), averaging],
        section("delayed", delayed, alone),
        of_losses(losses),
    ]
    tokens = RUN["batch"]["target_samples"] * RUN["model"]["context"]
    note = f"lines of {rate_mbit:.1f} Mb/s, {VALUES:,} float32 values, {tokens:,} tokens a step, {REPLICAS} replicas"
    return Report("delayed", sections, note)


def section(name: str, found: Measured, alone: Measured) -> list[Figure]:
    target = 0.9 if name == "delayed" else None
    figures = [
        Figure(f"{name}_tokens_per_s", f"{name}: tokens per second", found.tokens_per_s, "", 0),
        Figure(f"{name}_step_s", "seconds of a step", found.step_s, "s"),
        Figure(f"{name}_busy", "share of the time in which the replicas computed", found.busy),
        Figure(f"{name}_others_share", "of the processor, by everything else", found.others_share),
    ]
    if found is not alone:
        relative = found.tokens_per_s / alone.tokens_per_s
        figures.append(Figure(f"{name}_speed", "speed over computing alone", relative, at_least=target))
    return figures


def of_losses(found: Losses) -> list[Figure]:
    within = found.difference / found.noise if found.noise else 0.0
    text = f"held-out loss, {len(found.synchronous)} orders of samples"
    return [
        Figure("synchronous_loss", f"{text}: synchronous", statistics.mean(found.synchronous), "nats", 4),
        Figure("delayed_loss", "every gradient one step old", statistics.mean(found.delayed), "nats", 4),
        Figure("loss_noise", "spread of the synchronous ones", found.noise, "nats", 4),
        Figure("loss_difference", "difference / spread", within, at_most=1.0),
    ]
