"""Flat tensors: a stage keeps all parameters in one, and likewise its gradient and each moment.

Gradient sums (`FlatSums`) are those of the current step and, in a delayed run, of the next step. `ahead` is 0 for the
current step and 1 for the next. They have no record of the microbatches in them; `model/stage/microbatch_books` has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from peerd.codec.tensors import dtype_name


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


class FlatSums:
    """Gradient sums of `steps` steps, initially zero."""

    def __init__(self, layout: FlatLayout, steps: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._layout = layout
        self._new = partial(_zeros, layout.count, dtype, torch.device(device))
        self._flat = [self._new() for _ in range(steps)]
        self._views = [layout.views(flat) for flat in self._flat]
        self._lent = False  # whether the current step's sum was lent

    @property
    def due(self) -> Tensor:
        """The sum of the current step itself, [layout.count]."""
        return self._flat[0]

    def lend(self) -> Tensor:
        """The sum of the current step, which will not change any more: later additions go to a copy."""
        self._lent = True
        return self._flat[0]

    def _replace_lent(self, flat: Tensor) -> None:
        """Replace the lent sum by another tensor."""
        self._lent = False
        self._flat[0], self._views[0] = flat, self._layout.views(flat)

    @torch.no_grad()
    def add(self, gradients: Iterable[Tensor | None], alpha: float, ahead: int) -> None:
        """Add `alpha` times one gradient per parameter, in the layout's order. None is zero; extra gradients are
        ignored.
        """
        if ahead == 0 and self._lent:
            self._replace_lent(self.due.clone())
        for total, gradient in zip(self._views[ahead], gradients, strict=False):
            if gradient is not None:
                total.add_(gradient.to(total.device), alpha=alpha)

    def clear(self, ahead: int) -> None:
        """Set one step's sum to zero."""
        if ahead == 0 and self._lent:
            self._flat[0], self._views[0] = self._flat[0].new_empty(0), []  # freed before its successor is allocated
            self._replace_lent(self._new())
        else:
            self._flat[ahead].zero_()

    def clear_all(self) -> None:
        """Set all sums to zero."""
        for ahead in range(len(self._flat)):
            self.clear(ahead)

    def step(self) -> None:
        """Drop the sum of the current step; the next step's sum becomes the current one."""
        self.clear(0)
        self._flat.append(self._flat.pop(0))
        self._views.append(self._views.pop(0))


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros. On the CPU it takes no memory until written: numpy requests zeroed pages from the system."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(count, dtype_name(dtype)))
