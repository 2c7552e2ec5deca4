"""Reference for a swarm's training: one plain torch process that makes the same steps on the same batches.

What was in each batch is read off the peers' own books at each commit. Not imported by anything but tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from peerd.codec.frames import from_frame
from peerd.messages.swarm import Mb
from peerd.model.stage.partition import whole_model
from peerd.model.stage.served_stage import ServedStage
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from tests.kit.papers import PaperLamb

STEPS = 10
OPTIMIZERS = {
    "sgd": OptimizerSection(name="sgd", lr=0.3, total_steps=STEPS),
    "adamw": OptimizerSection(name="adamw", lr=3e-3, weight_decay=0.01, total_steps=STEPS),
    "lamb": OptimizerSection(name="lamb", lr=1e-2, weight_decay=0.01, eps=1e-6, total_steps=STEPS),
}
Sample = tuple[torch.Tensor, torch.Tensor, int]  # tokens, targets, and the step of the parameters
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def write_texts(folder: Path) -> Path:
    """Twenty files of pseudo-text; returns the pattern that names them."""
    for i in range(20):
        (folder / f"text{i}.txt").write_bytes(bytes((7 * i + 13 * j * j + j // 3) % 251 or 251 for j in range(4000)))
    return folder / "*.txt"


def run_file(optimizer: str, dtype: Any, text: Path, stages: int = 2) -> RunFile:
    """A small run. AdamW's eps is larger in fp32, so that rounding is small beside it.

    With 1e-8 a gradient that is nearly zero moves its parameter by its sign, hence by its rounding: two plain
    processes that sum the same samples in another order then differ by more than 1e-5 in one run of twelve.
    """
    section = OPTIMIZERS[optimizer]
    if optimizer == "adamw" and dtype == "float32":
        section = msgspec.structs.replace(section, eps=1e-6)
    return RunFile(
        run=f"exact-{optimizer}-{dtype}",
        seed=5,
        model=ModelSection(d_model=32, heads=2, layers=2, context=32, dtype=dtype),
        pipeline=PipelineSection(stages=stages, microbatch=2),
        optimizer=section,
        batch=BatchSection(target_samples=16),
        data=DataSection(path=str(text), holdout=0.1),
        evaluate=EvaluateSection(every_steps=0),
        checkpoint=CheckpointSection(every_steps=0),
    )


class Batches:
    """Every microbatch that a commit counted: by step, its samples. `digests`: of all peers that made a step."""

    def __init__(self) -> None:
        self.inputs: dict[int, dict[Mb, torch.Tensor]] = {}  # as the first stage saw them
        self.targets: dict[int, dict[Mb, torch.Tensor]] = {}  # as the last one did
        self.digests: dict[tuple[int, int], set[bytes]] = {}  # by stage and step: parameters after it
        self._disputed: list[str] = []

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
                if not torch.equal(book.setdefault(step, {}).setdefault(mb, tokens), tokens):
                    self._disputed.append(f"stage-mates had other samples of {mb} at step {step}")

    def faults(self, per_step: int, steps: int = STEPS) -> list[str]:
        """Empty when every step had the whole batch, the same in all stages, and all that made it got the same bits."""
        faults = list(self._disputed)
        for step in range(steps):
            inputs, targets = self.inputs.get(step, {}), self.targets.get(step, {})
            if inputs.keys() != targets.keys():
                faults.append(f"stages differ at step {step}")
            if len(inputs) != per_step:
                faults.append(f"step {step} had {sorted(inputs)}")
        return faults + [f"mates differ at {place}" for place, found in self.digests.items() if len(found) != 1]


def stepping(parameters: list[torch.nn.Parameter], o: OptimizerSection) -> Callable[[], object]:
    """The function that makes a step with the gradients that are there: torch's own optimizer where it has one."""
    if o.name == "sgd":
        return torch.optim.SGD(parameters, lr=o.lr).step
    if o.name == "adamw":
        return torch.optim.AdamW(parameters, o.lr, (o.beta1, o.beta2), o.eps, weight_decay=o.weight_decay).step
    values = [parameter.detach().numpy() for parameter in parameters]
    lamb = PaperLamb(o, values)
    return lambda: lamb.step(values, [parameter.grad.numpy() for parameter in parameters], o.lr)


def plain_torch(run: RunFile, batches: Batches, steps: int = STEPS) -> torch.nn.Module:
    """The same steps in one process."""
    model = whole_model(run)
    make_step = stepping(list(model.parameters()), run.optimizer)
    for step in range(steps):
        order = sorted(batches.inputs[step])
        tokens = torch.cat([batches.inputs[step][mb] for mb in order])
        targets = torch.cat([batches.targets[step][mb] for mb in order])
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        model.zero_grad()
        loss.backward()
        make_step()
    return model


def replayed(run: RunFile, batches: Mapping[int, Mapping[Mb, Sample]], steps: int) -> torch.nn.Module:
    """The same steps in one process, each sample with the parameters that it was computed with: a delayed run's."""
    model = whole_model(run)
    parameters = list(model.parameters())
    make_step = stepping(parameters, run.optimizer)
    past = [[p.detach().clone() for p in parameters]]  # before each step
    for step in range(steps):
        sums, samples = [torch.zeros_like(p) for p in parameters], 0
        for _, (tokens, targets, at) in sorted(batches[step].items()):
            put(parameters, past[at])
            model.zero_grad()
            logits = model(tokens)
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            for total, p in zip(sums, parameters, strict=True):
                total += p.grad * len(tokens)
            samples += len(tokens)
        put(parameters, past[step])
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total / samples
        make_step()
        past.append([p.detach().clone() for p in parameters])
    return model


@torch.no_grad()
def put(parameters: list[torch.nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, over the whole tensor."""
    return float((found - expected).norm() / expected.norm().clamp_min(1e-30))


def differences(run: RunFile, model: torch.nn.Module, stages: list[StageModule], steps: int = STEPS) -> list[str]:
    """Empty when the stages together have the model's parameters, to the tolerance of the run's dtype."""
    expected = dict(model.named_parameters())
    found = [f"stage {stage.stage} made {stage.step} steps" for stage in stages if stage.step != steps]
    seen = set()
    for stage in stages:
        for name, value in stage.state().items():
            if name.startswith("param/"):
                seen.add(name.removeprefix("param/"))
                plain = expected[name.removeprefix("param/")].detach()
                difference = distance(value, plain)
                if not difference <= TOLERANCE[run.model.dtype]:
                    found.append(f"{name} differs by {difference:.2e}")
    return found + [f"no stage has {name}" for name in sorted(expected.keys() - seen)]
