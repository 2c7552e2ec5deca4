"""Flat tensors: all parameters of a stage, its gradient and each moment lie in one, and this says where each is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Layout of a flat tensor: the place of each parameter; the order is that of `names`."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def count(self) -> int:
        """Values in the flat tensor."""
        return sum(shape.numel() for shape in self.shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's slice in its own shape; writing to a view writes to `flat`."""
        parts = torch.split(flat, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
