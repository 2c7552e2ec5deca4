"""Speed of a swarm on one machine, compared with plain torch on the same cores.

Two models: the demo's, and one twenty times as large. `torch`: one process that makes the same steps on all cores, one
microbatch at a time or the whole batch at once, whichever is faster. `pipeline`: a backbone, two stages of one peer and
a trainer. `replicas`: a backbone and two trainers, each with the whole model. Each peer is a `peerd` process with one
thread. Speed is that of the median step after warm-up; `cores` is the number of cores that the swarm's processes kept
busy. Since a machine's speed changes within minutes, torch is measured before and after each swarm.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch.nn.functional import cross_entropy

from benchmarks._peers import Peers
from benchmarks._report import Figure, Report
from benchmarks._swarm import BASE
from peerd.compute.data.stream import samples_of
from peerd.compute.model.partition import whole_model
from peerd.core.decoders import convert
from peerd.core.run.runfile import RunFile

CORES: Final = os.cpu_count() or 1
MODELS: Final[dict[str, dict[str, int]]] = {
    "small": {"d_model": 96, "heads": 3, "layers": 2, "context": 128},
    "large": {"d_model": 336, "heads": 6, "layers": 4, "context": 128},
}
MICROBATCH, MICROBATCHES = 4, 8
WARM_STEPS: Final = 3
LEAST: Final = 0.8  # target for the larger model, relative to torch's speed
PATIENCE_S: Final = 120.0


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


# --- plain torch --------------------------------------------------------------------------------------------------


def torch_tokens_s(model: str, steps: int) -> float:
    """Tokens per second of one process on all cores, by its median step, with the faster way to compute a batch."""
    run = convert(run_file(model, 1), RunFile)
    stream = samples_of(run, "plain")
    batches = [stream.take(MICROBATCH * MICROBATCHES) for _ in range(WARM_STEPS)]
    before = torch.get_num_threads()
    torch.set_num_threads(CORES)
    try:
        times = [_median_step_s(run, batches, parts, steps) for parts in (MICROBATCHES, 1)]
    finally:
        torch.set_num_threads(before)
    return step_tokens(model) / min(times)


def _median_step_s(run: RunFile, batches: list[torch.Tensor], parts: int, steps: int) -> float:
    model = whole_model(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.optimizer.lr)
    times = []
    for step in range(WARM_STEPS + steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        for samples in batches[step % len(batches)].long().chunk(parts):
            out = model(samples[:, :-1])
            (cross_entropy(out.flatten(0, 1), samples[:, 1:].flatten()) / parts).backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_STEPS:])


# --- the swarm ----------------------------------------------------------------------------------------------------


class Here:
    """This machine, with the same interface as a host of a lab."""

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, **options)


@dataclass(slots=True)
class Local(Peers):
    """A swarm's processes on this machine."""

    def run_measured(self, model: str, kind: str, steps: int) -> Measured:
        """Start a swarm of this kind, and measure `steps` steps after warm-up."""
        backbone = self._start("backbone", "backbone", "--listen", "/ip4/127.0.0.1/tcp/0")
        self.until(lambda: bool(backbone.addr()), "the backbone does not listen")
        run = run_file(model, 2 if kind == "pipeline" else 1)
        if kind == "pipeline":
            for stage in range(2):
                self._join(f"stage-{stage}", "stage", backbone.addr(), {**run, "limits": {"stage": stage}})
        for number in range(1 if kind == "pipeline" else 2):
            self._join(f"trainer-{number}", "trainer", backbone.addr(), run, "--log-level", "debug")
        self._wait_for(WARM_STEPS)
        busy_s, began = sum(peer.cpu_s() for peer in self.peers), time.monotonic()
        first = len(self._ends())
        self._wait_for(first + steps)
        cores = (sum(peer.cpu_s() for peer in self.peers) - busy_s) / (time.monotonic() - began)
        ends = self._ends()[first - 1 :]
        median_s = statistics.median(end - begin for begin, end in itertools.pairwise(ends))
        return Measured(step_tokens(model) / median_s, cores)

    def end(self) -> None:
        for peer in self.peers:
            peer.popen.kill()
            peer.popen.wait()

    def _ends(self) -> list[float]:
        return [event["time"] for event in self.peers[-1].events() if event["name"] == "trainer.stepped"]

    def _wait_for(self, steps: int) -> None:
        self.until(lambda: len(self._ends()) >= steps, f"step {steps} was never done", PATIENCE_S)

    def _join(self, name: str, role: str, entry: str, run: dict[str, Any], *more: str) -> None:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(run))
        listen = ("--listen", "/ip4/127.0.0.1/tcp/0")
        self._start(name, "join", "--role", role, "--model", str(file), "--bootstrap", entry, *listen, *more)

    def _start(self, name: str, *arguments: str) -> Any:
        return self.start_peer(Here(), name, *arguments)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Measured:
    """Results of one swarm."""

    tokens_per_s: float
    cores: float


def swarm_of(model: str, kind: str, steps: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="peerd-onemachine-") as folder:
        swarm = Local(Path(folder))
        try:
            return swarm.run_measured(model, kind, steps)
        finally:
            swarm.end()


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
