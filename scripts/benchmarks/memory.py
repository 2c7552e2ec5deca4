"""Memory of replicas and of stage peers, in bytes per parameter, compared with plain torch on the same model and batch.

Real `peerd` processes on this machine: two replicas, and a pipeline of two stages with two peers each. The memory of a
process with the same role and a tiny model, which is that of peerd and torch themselves, is subtracted. `rest` is the
private memory of a stage peer when nothing is computed; for replicas, which never pause, the minimum while they train.
`steps` is the peak of resident memory in steps, and `checkpoint` in steps with a checkpoint. `giving` and `newcomer`
are the peaks of older peers and of a new one while the new one fetches the state and makes its first step. `foretold`
is the peak in steps that `peerd doctor` and `peerd plan` predict. Replicas of kind `half` compute in bf16. A stage peer
may keep the activations of one microbatch. Linux only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks._memory_watch import MemoryWatch, Span, longest
from benchmarks._peers import ROOT, Peer, Peers
from benchmarks._report import Figure, Report
from benchmarks._swarm import BASE
from peerd.core.decoders import convert
from peerd.core.model.model_size import stage_sizes
from peerd.core.run.runfile import RunFile

MICROBATCH, MICROBATCHES = 4, 4
CHECKPOINT_STEPS: Final = 4
MODEL: Final = {"d_model": 512, "heads": 8, "context": 64}
NOTHING: Final = {"d_model": 16, "heads": 2, "context": 64}
LAYERS: Final = {"replica": 8, "stage": 16, "half": 8}  # 25 million parameters in each process
VOCAB_SIZE: Final = 256  # of bytes
MOST: Final = {"rest": 22.0, "steps": 28.0, "checkpoint": 28.0, "giving": 28.0}  # per parameter, without activations
ACTIVATIONS_MB: Final = 160  # of a stage peer: for one microbatch, as in plain torch; by default half the free memory
MOST_OVER_TORCH: Final = 1.5
MOST_OFF: Final = 0.1  # relative difference of measured and predicted
PATIENCE_S: Final = 600.0
IDLE_S: Final = 20.0
SEEN_S: Final = 0.5  # for samples of memory after each step: steps of the tiny model take milliseconds


def run_file(kind: str, model: dict[str, int], layers: int) -> dict[str, Any]:
    return BASE | {
        "run": f"memory-{kind}",
        "model": model | {"layers": layers, "precision": "bf16" if kind == "half" else "full"},
        "pipeline": {"stages": 2 if kind == "stage" else 1, "microbatch": MICROBATCH},
        "optimizer": {"name": "adamw", "lr": 1.0e-4, "total_steps": 10_000},
        "batch": {"target_samples": MICROBATCH * MICROBATCHES},
        "checkpoint": {"every_steps": CHECKPOINT_STEPS, "keep": 1},
    }


@dataclass(slots=True)
class Local(Peers):
    """A swarm's processes on this machine, and the memory of each."""

    kind: str
    run: dict[str, Any]
    watch: MemoryWatch = field(default_factory=MemoryWatch, init=False)
    entry: str = field(default="", init=False)

    def measured(self, newcomer: bool) -> dict[str, Span]:
        """Run the swarm. Returns the largest memory of any of its processes, by phase."""
        backbone = self._start("backbone", "backbone", "--listen", "/ip4/127.0.0.1/tcp/0")
        self.until(lambda: bool(backbone.addr()), "the backbone does not listen")
        self.entry = backbone.addr()
        names = [self._join(number) for number in range(4 if self.kind == "stage" else 2)]
        if self.kind == "stage":
            self._start_role("trainer", "trainer", self.run)
        saved = CHECKPOINT_STEPS
        first, before, after = [self._stepped(names, step) for step in (1, saved - 1, saved + 1)]
        found = {
            "rest": self._most(names, first, after),
            "steps": self._most(names, first, before),
            "checkpoint": self._most(names, before, after),
        }
        if newcomer:
            one = self._join(len(names))
            end = self._stepped([one], saved + 3)  # at least one step of its own
            found |= {"giving": self._most(names, after, end), "newcomer": self._most([one], 0.0, end)}
            if self.kind == "stage":
                found["rest"] = self._idle(names)
        return found

    def end(self) -> None:
        for peer in self.peers:
            peer.popen.kill()
            peer.popen.wait()

    def _idle(self, names: list[str]) -> Span:
        """Memory of the stage peers some time after the last trainer has left."""
        trainer = next(peer for peer in self.peers if peer.name == "trainer")
        trainer.popen.terminate()
        trainer.popen.wait()
        time.sleep(IDLE_S)
        return self._most(names, time.time() - SEEN_S, time.time())

    def _most(self, names: list[str], begin: float, end: float) -> Span:
        return longest({name: self.watch.between(name, begin, end) for name in names})

    def _stepped(self, names: list[str], step: int) -> float:
        """Wait until all have made `step`. Returns the time."""
        peers = [peer for peer in self.peers if peer.name in names]

        def done() -> bool:
            return all(int(peer.role().get("step") or 0) >= step for peer in peers)

        self.until(done, f"step {step} was never done", PATIENCE_S)
        time.sleep(SEEN_S)
        return time.time()

    def _join(self, number: int) -> str:
        if self.kind == "stage":
            limits = {"stage": number % 2, "activations_mb": ACTIVATIONS_MB}
            return self._start_role(f"stage-{number}", "stage", {**self.run, "limits": limits})
        return self._start_role(f"replica-{number}", "trainer", self.run)

    def _start_role(self, name: str, role: str, run: dict[str, Any]) -> str:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(run))
        listen = ("--listen", "/ip4/127.0.0.1/tcp/0", "--threads", "1")
        self._start(name, "join", "--role", role, "--model", str(file), "--bootstrap", self.entry, *listen)
        return name

    def _start(self, name: str, *arguments: str) -> Peer:
        peer = self.start_peer(_Here(), name, *arguments)  # type: ignore[arg-type]
        self.watch.add(name, peer.popen.pid)
        return peer


class _Here:
    """This machine, on which processes are started."""

    def popen(self, argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, **options)


def swarm_of(kind: str, model: dict[str, int], layers: int, newcomer: bool) -> dict[str, Span]:
    with tempfile.TemporaryDirectory(prefix="peerd-memory-") as folder:
        swarm = Local(Path(folder), kind, run_file(kind, model, layers))
        try:
            with swarm.watch.watching():
                return swarm.measured(newcomer)
        finally:
            swarm.end()


def torch_of(kind: str, model: dict[str, int], layers: int, stage: int) -> tuple[Span, int]:
    """Memory of plain torch for one stage, and the number of its parameters."""
    with tempfile.TemporaryDirectory(prefix="peerd-memory-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(run_file(kind, model, layers)))
        argv = [sys.executable, "-m", "benchmarks._memory_torch", str(file), str(stage)]
        paths = os.pathsep.join(filter(None, [str(ROOT / "scripts"), str(ROOT), *sys.path]))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        told = subprocess.run(argv, check=True, capture_output=True, env=env, text=True).stdout
    found = json.loads(told.splitlines()[-1])
    return Span(found["peak"], found["rest"]), found["parameters"]


@dataclass(frozen=True, slots=True)
class Kind:
    """Measurements of one kind of peer, without the memory of one with a tiny model."""

    parameters: int  # of the largest stage
    spans: dict[str, Span]
    plain: Span
    foretold: int  # bytes of the largest stage

    def per_parameter(self) -> dict[str, float]:
        """Bytes per parameter: at rest, and the peak of each phase; also of plain torch."""
        found = {"rest": self.spans["rest"].rest / self.parameters}
        found |= {phase: span.peak / self.parameters for phase, span in self.spans.items() if phase != "rest"}
        found["torch_rest"] = self.plain.rest / self.parameters
        found["torch_peak"] = self.plain.peak / self.parameters
        return found | {"foretold": self.foretold / self.parameters}


def measure_kind(kind: str) -> Kind:
    layers, stages = LAYERS[kind], 2 if kind == "stage" else 1
    base = swarm_of(kind, NOTHING, stages, newcomer=False)["rest"]  # the same in all phases
    plain_base = torch_of(kind, NOTHING, stages, 0)[0]
    plain = [torch_of(kind, MODEL, layers, stage) for stage in range(stages)]
    found = swarm_of(kind, MODEL, layers, newcomer=True)
    most = longest({str(index): span for index, (span, _) in enumerate(plain)})
    spans = {phase: span.beside(base) for phase, span in found.items()}
    sizes = stage_sizes(convert(run_file(kind, MODEL, layers), RunFile), VOCAB_SIZE)
    foretold = max(size.memory_bytes for size in sizes)
    return Kind(max(count for _, count in plain), spans, most.beside(plain_base), foretold)


def measure(full: bool) -> Report:
    kinds = {kind: measure_kind(kind) for kind in LAYERS}
    extra = {kind: found.per_parameter() for kind, found in kinds.items()}
    sections = [[*_section(kind, kinds[kind], figures)] for kind, figures in extra.items()]
    note = f"{MICROBATCHES} microbatches of {MICROBATCH} samples of {MODEL['context']} tokens a step; AdamW, float32"
    note += "; half: computed in bf16"
    return Report("memory, bytes a parameter", sections, note, {"bytes_per_parameter": extra})


def _section(kind: str, found: Kind, figures: dict[str, float]) -> Iterator[Figure]:
    activations = figures["torch_peak"] - 16.0
    yield Figure(f"{kind}_parameters", f"{kind}: parameters", found.parameters, "", 0)
    for phase, value in figures.items():
        most = MOST.get(phase)
        if most is not None and phase != "rest":
            most += max(0.0, activations)
        yield Figure(f"{kind}_{phase}", f"  {phase.replace('_', ' ')}", value, "", 1, at_most=most)
    over = figures["steps"] / figures["torch_peak"]
    yield Figure(f"{kind}_over_torch", "  steps over plain torch's peak", over, "", 2, at_most=MOST_OVER_TORCH)
    off = abs(figures["steps"] / figures["foretold"] - 1.0)
    yield Figure(f"{kind}_off", "  steps off what is foretold, share", off, "", 2, at_most=MOST_OFF)
