"""Training in plain torch, in one process, as the baseline of swarms: a whole model, or one stage of a pipeline.

As a program (`python -m scripts.plain_torch RUN.yaml STAGE THREADS`), it trains some steps and prints its memory and
step time as JSON, so that other memory of a benchmark's process does not count.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch import Tensor
from torch.nn.functional import cross_entropy

from peerd.core.decoders import convert
from peerd.data.stream import samples_of
from peerd.model.precision import Precision
from peerd.model.stage.partition import build
from peerd.run.runfile import RunFile
from scripts.process_usage import look_at, resident_peak

ROOT: Final = Path(__file__).resolve().parents[1]
STEPS: Final = 4


class PlainTraining:
    """Trains with torch's own optimizer: SGD or AdamW. Inputs and output gradients of a single stage are random."""

    def __init__(self, run: RunFile, stage: int | None = None, device: str = "cpu") -> None:
        stages = range(run.pipeline.stages) if stage is None else [stage]
        self.first, self.last = stage in (None, 0), stage in (None, run.pipeline.stages - 1)
        self.model = build(run, list(stages)).to(device)
        kind = torch.optim.SGD if run.optimizer.name == "sgd" else torch.optim.AdamW
        self._optimizer = kind(self.model.parameters(), lr=run.optimizer.lr)
        self._width, self._precision = run.model.d_model, Precision(run.precision, torch.device(device))
        self._dtype = next(self.model.parameters()).dtype  # of the loss, also where bf16 is computed

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self, samples: Tensor, parts: int = 1) -> None:
        """Make a step on samples [B, L + 1], computed in `parts` microbatches."""
        self._optimizer.zero_grad()
        for part in samples.long().chunk(parts):
            self._backward(part[:, :-1], part[:, 1:], parts)
        self._optimizer.step()

    def _backward(self, tokens: Tensor, targets: Tensor, parts: int) -> None:
        x = tokens if self.first else torch.randn(*tokens.shape, self._width, requires_grad=True)
        with self._precision.casting():
            y = self.model(x)
        y = y.to(self._dtype)
        if self.last:
            (cross_entropy(y.flatten(0, 1), targets.flatten()) / parts).backward()
        else:
            y.backward(torch.randn_like(y))


def median_step_s(training: PlainTraining, batches: Sequence[Tensor], parts: int, warm: int, steps: int) -> float:
    """Seconds of the median step after `warm` steps, on these batches in turn."""
    times = []
    for step in range(warm + steps):
        batch = batches[step % len(batches)]
        began = time.perf_counter()
        training.step(batch, parts)
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[warm:])


@dataclass(frozen=True, slots=True)
class Alone:
    """A process that trains in plain torch: seconds of a step, memory in bytes, and number of parameters."""

    step_s: float
    peak: int
    rest: int  # private memory between two steps
    parameters: int


def alone(run: dict[str, Any], stage: int, threads: int = 1) -> Alone:
    """Train a stage of this run file in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="peerd-plain-") as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(run))
        argv = [sys.executable, "-m", "scripts.plain_torch", str(file), str(stage), str(threads)]
        env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        told = subprocess.run(argv, check=True, capture_output=True, cwd=ROOT, env=env, text=True).stdout
    return Alone(**json.loads(told.splitlines()[-1]))


def measured(run: RunFile, stage: int) -> Alone:
    """Train a stage in this process, and measure."""
    training, stream = PlainTraining(run, stage), samples_of(run, "plain")
    parts = run.batch.target_samples // run.pipeline.microbatch
    peak, looks, ends = 0, [], list[float]()
    for _ in range(STEPS):
        training.step(stream.take(run.batch.target_samples), parts)
        peak = max(peak, resident_peak())
        looks.append(look_at(os.getpid()))
        ends.append(time.monotonic())
    return Alone((ends[-1] - ends[0]) / (STEPS - 1), peak, looks[-1].private, training.parameters)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[3]))
    print(
        json.dumps(asdict(measured(convert(yaml.safe_load(Path(sys.argv[1]).read_text()), RunFile), int(sys.argv[2]))))
    )
