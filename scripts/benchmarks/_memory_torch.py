"""Plain torch in a separate process, with the same model, microbatches and AdamW. Prints its memory and step time.

Arguments: a run file, the stage, and the number of threads (default 1). For a stage of a pipeline, inputs and output
gradients are random.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import yaml
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks._memory_watch import Look, look_at, resident_peak
from peerd.compute.data.stream import samples_of
from peerd.compute.model.partition import build
from peerd.compute.model.precision import Precision
from peerd.core.decoders import convert
from peerd.core.run.runfile import RunFile

STEPS = 4


def main(file: str, stage: int, threads: int) -> None:
    run = convert(yaml.safe_load(Path(file).read_text()), RunFile)
    torch.set_num_threads(threads)
    model = build(run, [stage])
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.optimizer.lr)
    stream, parts = samples_of(run, "plain"), run.batch.target_samples // run.pipeline.microbatch
    look: Look | None = None
    peak, ends = 0, list[float]()
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(parts):
            _microbatch(run, model, stage, stream.take(run.pipeline.microbatch).long())
        optimizer.step()
        peak, look = max(peak, resident_peak()), look_at(_pid())
        ends.append(time.monotonic())
    assert look is not None
    step_s = (ends[-1] - ends[0]) / (STEPS - 1)
    count = sum(p.numel() for p in model.parameters())
    print(json.dumps({"peak": peak, "rest": look.private, "parameters": count, "step_s": step_s}))


def _microbatch(run: RunFile, model: torch.nn.Module, stage: int, samples: Tensor) -> None:
    tokens, targets = samples[:, :-1], samples[:, 1:]
    x = tokens if stage == 0 else torch.randn(*tokens.shape, run.model.d_model, requires_grad=True)
    with Precision(run.precision, torch.device("cpu")).casting():
        y = model(x)
    y = y.float()
    if stage == run.pipeline.stages - 1:
        torch.autograd.backward(cross_entropy(y.flatten(0, 1), targets.flatten()))
    else:
        torch.autograd.backward(y, torch.randn_like(y))


def _pid() -> int:
    return int(Path("/proc/self").readlink().name)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1)
