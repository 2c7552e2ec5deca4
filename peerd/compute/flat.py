"""Flat tensors: a stage keeps all parameters in one, and likewise its gradient and each moment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Layout of a flat tensor: names and shapes of the parameters, in their order."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def count(self) -> int:
        """Number of values in the flat tensor."""
        return sum(shape.numel() for shape in self.shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's slice in its own shape; writing to a view writes to `flat`."""
        parts = torch.split(flat, [shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]
