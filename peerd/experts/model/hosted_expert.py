"""An expert on its host: forward, backward with an immediate update, snapshots.

Synchronous: jobs of one device worker, one at a time. Requests of several callers are computed as one batch. A backward
of such a batch is one update, with the gradient summed over all its samples; it recomputes the forward with the current
weights (Learning@home, section 3.1). Weights and moments are float32; samples in bfloat16 are computed with torch's
autocast.

A malicious caller may send another shape or dtype, values that are not finite, or gradients so large that the update or
the moments would overflow. Each raises `BadRequest`, a ValueError with the request's index in the batch, before
anything changes. A state to load may have other names or shapes, NaN, or a wrong size; that raises ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from peerd.codec.flat import FlatLayout
from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import decode, encode
from peerd.codec.layout import NotFinite
from peerd.codec.policy import CodingPlan
from peerd.codec.tensors import TORCH_DTYPES, all_finite
from peerd.core.errors import ProtocolViolation
from peerd.experts.model.blocks import build_block
from peerd.model.optimizer import Optimizer
from peerd.model.precision import Precision
from peerd.run.grid import Uid, sample_shapes
from peerd.run.runfile import ExpertOptimizerSection, ExpertsSection, OptimizerSection, RunFile

LARGEST_NORM: Final = 1e18  # of a gradient: float32 can represent its square, and moments made of it
_HEADER_BYTES: Final = 1 << 20  # of a snapshot's names and shapes
_LAST_VERSION: Final = 1 << 53  # messages carry smaller numbers


class BadRequest(ValueError):
    """The request at `index` of a batch cannot be computed. Nothing was changed."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class HostedExpert:
    """Expert `uid` of a run on `device`. `version` counts its updates."""

    def __init__(self, run: RunFile, uid: Uid, device: str = "cpu") -> None:
        """Starts with the initial weights of (run.seed, uid); raises ConfigError if the block cannot be built."""
        self.uid = uid
        self.version = 0
        self.device = torch.device(device)
        section = run.experts or ExpertsSection()
        self._input, self._output = sample_shapes(run)
        self._dtype = TORCH_DTYPES[section.dtype]
        self._plan = CodingPlan(section.code)
        self._precision = Precision("bf16" if section.dtype == "bfloat16" else "full", self.device)
        self._module = build_block(run, uid).to(self.device)
        named = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._parameters = list(named.values())
        self._layout = FlatLayout(tuple(named), tuple(p.shape for p in self._parameters))
        self._flat = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        for parameter, view in zip(self._parameters, self._layout.views(self._flat), strict=True):
            parameter.data = view
        self._optimizer = Optimizer(optimizer_section(section.optimizer), self._layout, self._flat)

    @property
    def nbytes(self) -> int:
        """Bytes of memory used between jobs: weights, moments and buffers."""
        return sum(tensor.nbytes for tensor in self._views().values())

    @torch.no_grad()
    def forward(self, xs: Sequence[TensorFrame]) -> list[TensorFrame]:
        """Outputs of several requests, computed as one batch."""
        inputs = [self._decoded(x, "samples", self._input, i) for i, x in enumerate(xs)]
        return self._frames(self._compute(torch.cat(inputs)), inputs, "outputs")

    def backward(self, pairs: Sequence[tuple[TensorFrame, TensorFrame]]) -> list[TensorFrame]:
        """One update for several requests (samples, gradients of outputs); returns the gradients of their samples."""
        inputs = [self._decoded(x, "samples", self._input, i) for i, (x, _) in enumerate(pairs)]
        slopes = [self._decoded(g, "gradients", self._output, i) for i, (_, g) in enumerate(pairs)]
        for index, (x, g) in enumerate(zip(inputs, slopes, strict=True)):
            if len(x) != len(g):
                raise BadRequest(f"expert {self.uid} got {len(x)} samples with gradients of {len(g)}", index)
        of_x, of_weights = self._gradients(torch.cat(inputs), torch.cat(slopes))
        if not _is_usable(of_weights):
            raise BadRequest(
                f"expert {self.uid}: an update with these gradients overflows", self._culprit(inputs, slopes)
            )
        answers = self._frames(of_x, inputs, "gradients of samples")
        self._optimizer.update(self._flat, of_weights, self.version)
        self.version += 1
        return answers

    def snapshot(self) -> bytes:
        """Weights, moments and version as safetensors; equal states give equal bytes."""
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self._views().items()}
        # The weights are views of one flat tensor, but safetensors needs separate tensors.
        state = {name: tensor.clone() for name, tensor in state.items()}
        data: bytes = safetensors.torch.save(state | {"version": torch.tensor(self.version, dtype=torch.int64)})
        return data

    def load(self, data: bytes | bytearray) -> None:
        """Load a snapshot; raises ValueError, before any change, if it does not fit."""
        mine = self._views()
        if len(data) > self.nbytes + _HEADER_BYTES:
            raise ValueError(f"the state of expert {self.uid} has {len(data)} bytes; expected about {self.nbytes}")
        try:
            state = safetensors.torch.load(bytes(data))  # does not copy if `data` is bytes
        except (safetensors.SafetensorError, KeyError) as error:
            raise ValueError(f"the state of expert {self.uid} is no safetensors file: {error}") from None
        version = _version_in(state, self.uid)
        _check_state(mine, state, self.uid)
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(state[name])
        self.version = version

    # --- inside -------------------------------------------------------------------------------------------------

    def _views(self) -> dict[str, Tensor]:
        """The live tensors, by their names in a snapshot."""
        names = self._layout.names
        views = {f"param/{name}": view for name, view in zip(names, self._layout.views(self._flat), strict=True)}
        for moment, flat in self._optimizer.moments.items():
            parts = zip(names, self._layout.views(flat), strict=True)
            views |= {f"opt/{name}/{moment}": view for name, view in parts}
        views |= {f"fixed/{name}": p.data for name, p in self._module.named_parameters() if not p.requires_grad}
        return views | {f"buffer/{name}": buffer for name, buffer in self._module.named_buffers()}

    def _decoded(self, frame: TensorFrame, what: str, sample: tuple[int, ...], index: int) -> Tensor:
        name = f"{what} for expert {self.uid}"
        try:
            found = decode(frame, (None, *sample), self._dtype, name=name, finite=True, device=self.device)
        except ProtocolViolation as error:
            raise BadRequest(str(error), index) from None
        if not len(found):
            raise BadRequest(f"no {name}", index)
        return found

    def _compute(self, x: Tensor) -> Tensor:
        with self._precision.casting():
            y: Tensor = self._module(x if self._dtype is torch.bfloat16 else x.float())
        return y.to(self._dtype)

    def _gradients(self, x: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the samples, and flat gradient of the weights."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            found = torch.autograd.grad(self._compute(x), [x, *self._parameters], slope, materialize_grads=True)
        return found[0], torch.cat([g.reshape(-1) for g in found[1:]])

    def _culprit(self, inputs: Sequence[Tensor], slopes: Sequence[Tensor]) -> int:
        """The request to blame for an overflowing gradient: one that overflows alone, else the largest."""
        norms = [_norm(self._gradients(x, g)[1]) for x, g in zip(inputs, slopes, strict=True)]
        return next((i for i, norm in enumerate(norms) if not norm < LARGEST_NORM), norms.index(max(norms)))

    def _frames(self, joined: Tensor, inputs: Sequence[Tensor], what: str) -> list[TensorFrame]:
        """One frame per request; raises BadRequest if the rows of a request are not finite."""
        parts = torch.split(joined, [len(x) for x in inputs])
        for index, part in enumerate(parts):
            if not all_finite(part):
                raise BadRequest(f"expert {self.uid}: the {what} are not finite for these samples", index)
        return [self._frame(part.contiguous(), what, index) for index, part in enumerate(parts)]

    def _frame(self, values: Tensor, what: str, index: int) -> TensorFrame:
        try:
            return encode(values, self._plan, name=f"{what} by expert {self.uid}")
        except NotFinite as error:  # codes have a slightly smaller range than float32
            raise BadRequest(str(error), index) from None


def optimizer_section(section: ExpertOptimizerSection) -> OptimizerSection:
    """Convert an expert's optimizer section to a run's OptimizerSection; each update of the expert counts as a step."""
    return OptimizerSection(
        name=section.name,
        lr=section.lr,
        warmup_steps=section.warmup_updates,
        total_steps=section.total_updates,
        decay=section.decay,
        final_lr_share=section.final_lr_share,
        weight_decay=section.weight_decay,
        momentum=section.momentum,
        beta1=section.beta1,
        beta2=section.beta2,
        eps=section.eps,
        clip_norm=section.clip_norm,
    )


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def _is_usable(gradient: Tensor) -> bool:
    return _norm(gradient) < LARGEST_NORM  # also False for NaN


def _version_in(state: dict[str, Tensor], uid: Uid) -> int:
    """Remove the update count from the state and return it."""
    version = state.pop("version", None)
    if version is None or version.shape != () or version.dtype != torch.int64 or not 0 <= version < _LAST_VERSION:
        raise ValueError(f"the state of expert {uid} has no valid update count")
    return int(version)


def _check_state(mine: dict[str, Tensor], state: dict[str, Tensor], uid: Uid) -> None:
    if strange := sorted(mine.keys() ^ state.keys()):
        lacks = "lacks" if strange[0] in mine else "has the unknown"
        raise ValueError(f"the state of expert {uid} {lacks} {strange[0][:100]}")
    for name, tensor in mine.items():
        found = state[name]
        if found.shape != tensor.shape or found.dtype != tensor.dtype:
            raise ValueError(
                f"{name} of expert {uid} is {list(found.shape)} {found.dtype}; "
                f"expected {list(tensor.shape)} {tensor.dtype}"
            )
        if not all_finite(found):
            raise ValueError(f"{name} of expert {uid} has values that are not finite")
        if name.endswith("/exp_avg_sq") and bool((found < 0).any()):
            raise ValueError(f"{name} of expert {uid} has negative squares")
