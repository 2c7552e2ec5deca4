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

import contextlib
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from peerd.core.decoders import convert
from peerd.model.shapes.model_size import stage_sizes
from peerd.run.runfile import RunFile
from scripts.benchmarks._report import Figure, Report
from scripts.plain_torch import alone
from scripts.process_swarm import BASE, ProcessSwarm
from scripts.process_usage import Look, look_at

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
_LOOK_S: Final = 0.1


def run_file(kind: str, model: dict[str, int], layers: int) -> dict[str, Any]:
    return BASE | {
        "run": f"memory-{kind}",
        "model": model | {"layers": layers, "precision": "bf16" if kind == "half" else "full"},
        "pipeline": {"stages": 2 if kind == "stage" else 1, "microbatch": MICROBATCH},
        "optimizer": {"name": "adamw", "lr": 1.0e-4, "total_steps": 10_000},
        "batch": {"target_samples": MICROBATCH * MICROBATCHES},
        "checkpoint": {"every_steps": CHECKPOINT_STEPS, "keep": 1},
    }


class MemoryWatch:
    """Samples processes periodically in a thread. `looks` has the samples of each process by name."""

    def __init__(self) -> None:
        self.looks: dict[str, list[Look]] = {}
        self._pids: dict[str, int] = {}
        self._over = threading.Event()

    def add(self, name: str, pid: int) -> None:
        self.looks[name] = []
        self._pids = {**self._pids, name: pid}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            for name, pid in self._pids.items():
                with contextlib.suppress(OSError, StopIteration):  # the process has ended
                    self.looks[name].append(look_at(pid))

    def between(self, name: str, begin: float, end: float) -> Span:
        """Memory of a process between two times in Unix seconds."""
        found = [look for look in self.looks[name] if begin <= look.at <= end]
        return Span(max(look.peak for look in found), min(look.private for look in found))


@dataclass(frozen=True, slots=True)
class Span:
    """Memory of a process in a period, in bytes: the highest resident size, and the lowest private size."""

    peak: int
    rest: int

    def beside(self, base: Span) -> Span:
        """The difference to `base`, which is usually a process without a model."""
        return Span(self.peak - base.peak, self.rest - base.rest)


def longest(spans: Mapping[str, Span]) -> Span:
    """The largest values of several processes."""
    return Span(max(span.peak for span in spans.values()), max(span.rest for span in spans.values()))


@dataclass(slots=True)
class WatchedSwarm(ProcessSwarm):
    """A swarm's processes on this machine, and the memory of each."""

    watch: MemoryWatch = field(default_factory=MemoryWatch, init=False)

    def measured(self, newcomer: bool) -> dict[str, Span]:
        """Run the swarm. Returns the largest memory of any of its processes, by phase."""
        self.start_backbone()
        names = [self._join(number) for number in range(4 if self._staged else 2)]
        if self._staged:
            self.join("trainer", "trainer")
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
            if self._staged:
                found["rest"] = self._idle(names)
        return found

    @property
    def _staged(self) -> bool:
        return bool(self.run["pipeline"]["stages"] > 1)

    def _idle(self, names: list[str]) -> Span:
        """Memory of the stage peers some time after the last trainer has left."""
        self.end(self.peer("trainer"), signal.SIGTERM)
        time.sleep(IDLE_S)
        return self._most(names, time.time() - SEEN_S, time.time())

    def _most(self, names: list[str], begin: float, end: float) -> Span:
        return longest({name: self.watch.between(name, begin, end) for name in names})

    def _stepped(self, names: list[str], step: int) -> float:
        """Wait until all have made `step`. Returns the time."""
        peers = [self.peer(name) for name in names]

        def done() -> bool:
            return all(int(peer.role().get("step") or 0) >= step for peer in peers)

        self.until(done, f"step {step} was never done", PATIENCE_S)
        time.sleep(SEEN_S)
        return time.time()

    def _join(self, number: int) -> str:
        if self._staged:
            peer = self.join(f"stage-{number}", "stage", stage=number % 2, activations_mb=ACTIVATIONS_MB)
        else:
            peer = self.join(f"replica-{number}", "trainer")
        self.watch.add(peer.name, peer.popen.pid)
        return peer.name


def swarm_of(kind: str, model: dict[str, int], layers: int, newcomer: bool) -> dict[str, Span]:
    run = run_file(kind, model, layers)
    with (
        tempfile.TemporaryDirectory(prefix="peerd-memory-") as folder,
        WatchedSwarm(Path(folder), run, options=("--threads", "1")) as swarm,
        swarm.watch.watching(),
    ):
        return swarm.measured(newcomer)


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
    plain_base = alone(run_file(kind, NOTHING, stages), 0)
    plain = [alone(run_file(kind, MODEL, layers), stage) for stage in range(stages)]
    found = swarm_of(kind, MODEL, layers, newcomer=True)
    most = Span(max(one.peak for one in plain), max(one.rest for one in plain))
    spans = {phase: span.beside(base) for phase, span in found.items()}
    sizes = stage_sizes(convert(run_file(kind, MODEL, layers), RunFile), VOCAB_SIZE)
    foretold = max(size.memory_bytes for size in sizes)
    most = most.beside(Span(plain_base.peak, plain_base.rest))
    return Kind(max(one.parameters for one in plain), spans, most, foretold)


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
