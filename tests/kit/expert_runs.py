"""Small runs with experts, and samples for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from peerd.codec.format.frame import TensorFrame
from peerd.run.runfile import ExpertOptimizerSection, ExpertsSection, ModelSection, RunFile

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WIDTH = 8


def expert_run(
    *sides: int, width: int = WIDTH, optimizer: dict[str, Any] | None = None, seed: int = 0, **experts: Any
) -> RunFile:
    """A run with one layer of 4 x 4 experts for samples of `width` values, or with a grid of these sides.

    `experts` replace single settings of the section.
    """
    own = {"grid": list(sides) or [4, 4], "layers": 1, "input": [width], "hidden": 16} | experts
    section = ExpertsSection(**own, optimizer=ExpertOptimizerSection(**(optimizer or {})))
    model = ModelSection(d_model=width, heads=1, layers=own["layers"], context=4)
    return RunFile(run="moe", seed=seed, model=model, experts=section)


def values(*shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Normal random numbers; float32 unless told otherwise."""
    import torch  # not by those who only need a run

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype or torch.float32)


def frame(*shape: int, seed: int = 0, dtype: torch.dtype | None = None) -> TensorFrame:
    """The same as a frame."""
    from peerd.codec.frames import to_frame

    return to_frame(values(*shape, seed=seed, dtype=dtype))
