"""Small runs with experts, and frames for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peerd.compute.codec.frames import to_frame
from peerd.core.frame import TensorFrame
from peerd.core.run.runfile import ExpertOptimizerSection, ExpertsSection, ModelSection, RunFile

WIDTH = 8


def expert_run(optimizer: dict[str, Any] | None = None, seed: int = 0, **experts: Any) -> RunFile:
    """A run whose experts are eight wide, in one layer of 4 x 4, unless told otherwise."""
    own = {"grid": [4, 4], "layers": 1, "input": [WIDTH], "hidden": 16} | experts
    section = ExpertsSection(**own, optimizer=ExpertOptimizerSection(**(optimizer or {})))
    model = ModelSection(d_model=WIDTH, heads=2, layers=1, context=4)
    return RunFile(run="test", seed=seed, model=model, experts=section)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal random numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def frame(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> TensorFrame:
    """The same as a frame."""
    return to_frame(values(*shape, seed=seed, dtype=dtype))
