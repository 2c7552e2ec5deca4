"""What a swarm's training is compared with: one plain torch process that makes the same steps on the same batches.

What was in each batch is read off the peers' own books at each commit. Not imported by anything but tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peerd.compute.model import whole_model
from peerd.compute.module import StageModule
from peerd.compute.served import ServedStage
from peerd.compute.tensors import from_frame
from peerd.core.runfile import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.core.training import Mb

STEPS = 10
OPTIMIZERS = {
    "sgd": OptimizerSection(name="sgd", lr=0.3, total_steps=STEPS),
    "adamw": OptimizerSection(name="adamw", lr=3e-3, weight_decay=0.01, total_steps=STEPS),
    "lamb": OptimizerSection(name="lamb", lr=1e-2, weight_decay=0.01, eps=1e-6, total_steps=STEPS),
}
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def write_texts(folder: Path) -> Path:
    """Twenty files of pseudo-text; returns the pattern that names them."""
    for i in range(20):
        (folder / f"text{i}.txt").write_bytes(bytes((7 * i + 13 * j * j + j // 3) % 251 for j in range(4000)))
    return folder / "*.txt"


def run_file(optimizer: str, dtype: Any, text: Path, stages: int = 2) -> RunFile:
    return RunFile(
        run=f"exact-{optimizer}-{dtype}",
        seed=5,
        model=ModelSection(d_model=32, heads=2, layers=2, context=32, dtype=dtype),
        pipeline=PipelineSection(stages=stages, microbatch=2),
        optimizer=OPTIMIZERS[optimizer],
        batch=BatchSection(target_samples=16),
        data=DataSection(path=str(text), holdout=0.1),
        evaluate=EvaluateSection(every_steps=0),
        checkpoint=CheckpointSection(every_steps=0),
    )


class Batches:
    """Every microbatch that a commit counted: by step, its samples. `digests`: of all who made a step."""

    def __init__(self) -> None:
        self.inputs: dict[int, dict[Mb, torch.Tensor]] = {}  # as the first stage saw them
        self.targets: dict[int, dict[Mb, torch.Tensor]] = {}  # as the last one did
        self.digests: dict[tuple[int, int], set[bytes]] = {}  # by stage and step: parameters after it

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Record each commit of this process's peers from now on."""
        original = ServedStage.commit

        def commit(served: ServedStage, step: int, total: Any, samples: int) -> None:
            self._record(served, step)
            original(served, step, total, samples)
            self.digests.setdefault((served.module.stage, step), set()).add(served.module.digest())

        monkeypatch.setattr(ServedStage, "commit", commit)

    def _record(self, served: ServedStage, step: int) -> None:
        books = [(self.inputs, 0)] if served.module.first else []
        books += [(self.targets, 1)] if served.module.last else []
        for book, place in books:
            for mb, kept in served._held.items():
                tokens = from_frame(kept.frames[place]).long()
                known = book.setdefault(step, {}).setdefault(mb, tokens)
                assert torch.equal(known, tokens)

    def check(self, per_step: int) -> None:
        """Every step had the whole batch, the same in all stages, and all who made it ended with the same bits."""
        for step in range(STEPS):
            assert self.inputs[step].keys() == self.targets[step].keys(), f"stages differ at step {step}"
            assert len(self.inputs[step]) == per_step, f"step {step} had {sorted(self.inputs[step])}"
        assert all(len(digests) == 1 for digests in self.digests.values()), "mates differ"


class _Lamb(torch.optim.Optimizer):
    """LAMB as "Large Batch Optimization for Deep Learning" has it (algorithm 2), one tensor at a time."""

    def __init__(self, parameters: Any, section: OptimizerSection) -> None:
        super().__init__(parameters, {})
        self._section = section
        self._steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._steps += 1
        o = self._section
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            m = state["m"] = o.beta1 * state.get("m", torch.zeros_like(p)) + (1 - o.beta1) * p.grad
            v = state["v"] = o.beta2 * state.get("v", torch.zeros_like(p)) + (1 - o.beta2) * p.grad**2
            m_hat, v_hat = m / (1 - o.beta1**self._steps), v / (1 - o.beta2**self._steps)
            update = m_hat / (v_hat.sqrt() + o.eps) + o.weight_decay * p
            size, length = float(p.norm()), float(update.norm())
            p.sub_(update, alpha=o.lr * (size / length if size > 0 and length > 0 else 1.0))


def plain_torch(run: RunFile, batches: Batches) -> torch.nn.Module:
    """The same steps in one process, with torch's own optimizers where it has them."""
    model = whole_model(run)
    o = run.optimizer
    optimizer: torch.optim.Optimizer
    if o.name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=o.lr)
    elif o.name == "lamb":
        optimizer = _Lamb(model.parameters(), o)
    else:
        betas = (o.beta1, o.beta2)
        optimizer = torch.optim.AdamW(model.parameters(), o.lr, betas, o.eps, weight_decay=o.weight_decay)
    for step in range(STEPS):
        order = sorted(batches.inputs[step])
        tokens = torch.cat([batches.inputs[step][mb] for mb in order])
        targets = torch.cat([batches.targets[step][mb] for mb in order])
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def assert_equal(run: RunFile, model: torch.nn.Module, stages: list[StageModule]) -> None:
    """The stages together have the model's parameters, to the tolerance of the run's dtype."""
    expected = dict(model.named_parameters())
    seen = set()
    for stage in stages:
        assert stage.step == STEPS
        for name, value in stage.state().items():
            if name.startswith("param/"):
                seen.add(name.removeprefix("param/"))
                plain = expected[name.removeprefix("param/")].detach()
                difference = float((value - plain).norm() / plain.norm().clamp_min(1e-30))
                assert difference <= TOLERANCE[run.model.dtype], f"{name} differs by {difference:.2e}"
    assert seen == expected.keys()
