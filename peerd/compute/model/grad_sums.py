"""Gradient accumulators: the sum of the step under way and, in a delayed run, of the step after it.

Flat, one value for each parameter. `ahead` counts steps from the one under way. `Sums` knows tensors, no microbatches;
`to_make_again` knows microbatches, no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from peerd.compute.flat import FlatLayout
from peerd.compute.tensors import dtype_name
from peerd.core.messages.swarm import Mb


def to_make_again(held: Collection[Mb], wanted: Iterable[Mb]) -> tuple[list[Mb], bool]:
    """The microbatches that are wanted and lacking in a sum that cannot be taken apart, and whether to forget it.

    It is forgotten, and all of them lack, where it has all that is wanted and something else besides.
    """
    wanted = set(wanted)
    missing = sorted(wanted.difference(held))
    if not missing and set(held) - wanted:
        return sorted(wanted), True
    return missing, False


class Sums:
    """Sums for `steps` steps, zero at first."""

    def __init__(self, layout: FlatLayout, steps: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self._layout = layout
        self._new = partial(_zeros, layout.count, dtype, torch.device(device))
        self._flat = [self._new() for _ in range(steps)]
        self._views = [layout.views(flat) for flat in self._flat]
        self._lent = False  # the sum of the step under way

    @property
    def due(self) -> Tensor:
        """The sum of the step under way itself, [layout.count]."""
        return self._flat[0]

    def lend(self) -> Tensor:
        """The sum of the step under way, which never changes any more: what is added later goes to a copy."""
        self._lent = True
        return self._flat[0]

    def _replace_lent(self, flat: Tensor) -> None:
        """Put another tensor in the place of the sum that is lent."""
        self._lent = False
        self._flat[0], self._views[0] = flat, self._layout.views(flat)

    @torch.no_grad()
    def add(self, gradients: Iterable[Tensor | None], alpha: float, ahead: int) -> None:
        """`alpha` times one gradient for each parameter, in the layout's order; None is zero, further ones unused."""
        if ahead == 0 and self._lent:
            self._replace_lent(self.due.clone())
        for total, gradient in zip(self._views[ahead], gradients, strict=False):
            if gradient is not None:
                total.add_(gradient.to(total.device), alpha=alpha)

    def clear(self, ahead: int) -> None:
        """Forget one step's sum."""
        if ahead == 0 and self._lent:
            self._flat[0], self._views[0] = self._flat[0].new_empty(0), []  # its memory may go before there is new one
            self._replace_lent(self._new())
        else:
            self._flat[ahead].zero_()

    def clear_all(self) -> None:
        """Forget everything."""
        for ahead in range(len(self._flat)):
            self.clear(ahead)

    def step(self) -> None:
        """The sum of the step under way is used up: that of the next one takes its place."""
        self.clear(0)
        self._flat.append(self._flat.pop(0))
        self._views.append(self._views.pop(0))


def _zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU they take no memory until something is added: numpy asks the system for cleared pages."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(count, dtype_name(dtype)))
