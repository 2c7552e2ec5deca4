"""A stage as it is served: calls in frames, microbatches that count once, and one step at a time.

Wraps a StageModule. For each microbatch of the step under way it keeps the inputs, the output gradient and the
answer: a repeat gets the kept answer, and a microbatch that must not count is taken out again by computing it a
second time with the opposite sign. All methods are synchronous and run on the device's worker, one at a time; every
method that belongs to a step says so and is refused at any other (`Stale`). Hostile input: frames of wrong shape,
dtype or value raise ProtocolViolation or ValueError before anything changes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from peerd.compute.module import StageModule
from peerd.compute.tensors import dtype_name, from_frame, raw_bytes, to_frame
from peerd.core.errors import PeerdError, ProtocolViolation
from peerd.core.frame import TensorFrame
from peerd.core.runfile import RunFile
from peerd.core.training import Mb

Vector = np.ndarray[Any, np.dtype[Any]]


class Stale(PeerdError):
    """The call belongs to another step than the stage's."""


class Outcome(NamedTuple):
    """What a call computed: the answer's frames, the loss sum (last stage), seconds of computing."""

    frames: tuple[TensorFrame, ...]
    loss_sum: float
    seconds: float


@dataclass(slots=True)
class _Kept:
    """One microbatch that this peer holds."""

    inputs: TensorFrame
    target: TensorFrame  # the output's gradient, or the targets in the last stage
    outcome: Outcome


class ServedStage:
    """Stage `stage` of `run`, ready to serve; `module.step` counts the global steps."""

    def __init__(self, run: RunFile, stage: int, device: str) -> None:
        self.run = run
        self.module = StageModule(run, stage, device)
        self._coding = run.pipeline.boundary.code
        self._held: dict[Mb, _Kept] = {}

    @property
    def held(self) -> list[Mb]:
        """The microbatches in the accumulator."""
        return list(self._held)

    def forward(self, step: int | None, frames: Sequence[TensorFrame]) -> Outcome:
        """One input frame; gives the output frame. `step` None: whatever step it is."""
        began = time.perf_counter()
        self._at(step)
        (x,) = self._tensors(frames, 1)
        y = self.module.forward(x)
        return Outcome((to_frame(y, self._coding),), 0.0, time.perf_counter() - began)

    def loss(self, frames: Sequence[TensorFrame]) -> Outcome:
        """Inputs and targets; gives the loss sum over the samples (last stage only)."""
        began = time.perf_counter()
        x, targets = self._tensors(frames, 2)
        total = self.module.loss(x, targets) * x.shape[0]
        return Outcome((), total, time.perf_counter() - began)

    def backward(self, step: int, mb: Mb, frames: Sequence[TensorFrame]) -> Outcome:
        """Inputs, then output gradients or targets: accumulate `mb` once, give the input's gradient."""
        began = time.perf_counter()
        self._at(step)
        kept = self._held.get(mb)
        if kept is not None:
            return kept.outcome
        x, target = self._tensors(frames, 2)
        gradient, loss_sum = self.module.backward(x, target)
        answer = () if gradient is None else (to_frame(gradient, self._coding),)
        outcome = Outcome(answer, loss_sum, time.perf_counter() - began)
        self._held[mb] = _Kept(frames[0], frames[1], outcome)
        return outcome

    def keep_only(self, step: int, wanted: Iterable[Mb]) -> list[Mb]:
        """Take out what is not wanted; returns what is wanted but not held (then nothing was changed)."""
        self._at(step)
        wanted = set(wanted)
        missing = sorted(wanted - self._held.keys())
        if missing:
            return missing
        for mb in sorted(self._held.keys() - wanted):
            kept = self._held.pop(mb)
            x, target = self._tensors((kept.inputs, kept.target), 2)
            self.module.backward(x, target, sign=-1.0)
        return []

    def vector(self) -> Vector:
        """A copy of the accumulated gradient sum, flat."""
        vector: Vector = self.module.gradient().cpu().numpy()
        return vector

    def commit(self, step: int, total: Vector, samples: int) -> None:
        """Step the optimizer with `total / samples`; what was held is counted and forgotten."""
        self._at(step)
        mean = torch.from_numpy(total) / samples
        self.module.apply(mean)
        self._held.clear()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Take over a whole state; ValueError (and no change) when it does not fit."""
        self.module.load_state(state)
        self._held.clear()

    def describe(self) -> list[tuple[str, str, tuple[int, ...], memoryview]]:
        """A frozen copy of the state as (name, dtype, shape, bytes), sorted by name."""
        state = self.module.state()
        return [(n, dtype_name(t.dtype), tuple(t.shape), raw_bytes(t)) for n, t in sorted(state.items())]

    def _at(self, step: int | None) -> None:
        if step is not None and step != self.module.step:
            raise Stale(f"the stage is at step {self.module.step}, the call at {step}")

    def _tensors(self, frames: Sequence[TensorFrame], count: int) -> list[torch.Tensor]:
        if len(frames) != count:
            raise ProtocolViolation(f"the call has {len(frames)} frames; expected {count}")
        return [from_frame(frame, name=f"frame {i}") for i, frame in enumerate(frames)]


def state_of(items: Iterable[tuple[str, str, tuple[int, ...], memoryview]]) -> dict[str, torch.Tensor]:
    """The inverse of `describe`."""
    return {name: from_frame(TensorFrame(dtype, shape, data), name=name).clone() for name, dtype, shape, data in items}
