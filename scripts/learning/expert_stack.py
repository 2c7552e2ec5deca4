"""All experts of one layer computed together: what so many `HostedExpert`s do, in a few large products.

Each expert begins with its own starting weights, is updated by itself at once with its own clipped gradient, and counts
its own updates; a test holds it to `HostedExpert`. SGD and AdamW, without schedules.

Shapes: P rows for experts (a sample and one of its experts each), E experts, R rows of the busiest, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from peerd.compute.experts.blocks import build_block
from peerd.core.experts.grid import Uid, grid_of
from peerd.core.run.runfile import ExpertsSection, RunFile


class ExpertStack:
    """Layer `layer` of experts of a run; `updates` [E] counts each one's."""

    def __init__(self, run: RunFile, layer: int) -> None:
        grid = grid_of(run)
        blocks = [build_block(run, grid.uid(layer * grid.places + i)) for i in range(grid.places)]
        self._block = blocks[0]
        self._optimizer = (run.experts or ExpertsSection()).optimizer
        states = [dict(block.named_parameters()) for block in blocks]
        self.weights = {name: torch.stack([s[name].detach() for s in states]) for name in states[0]}
        self._mean = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self._square = {name: torch.zeros_like(w) for name, w in self.weights.items()}
        self.updates = torch.zeros(len(blocks), dtype=torch.int64)

    def forward(self, rows_PD: Tensor, experts_P: Tensor) -> Tensor:
        """The output of each row's expert, [P, D]."""
        with torch.no_grad():
            padded, at = self._padded(rows_PD, experts_P)
            return self._compute(self.weights, padded)[at]

    def backward(self, rows_PD: Tensor, experts_P: Tensor, slopes_PD: Tensor) -> Tensor:
        """Gradients of the rows; each expert that has some makes one update."""
        padded, at = self._padded(rows_PD, experts_P)
        slopes = torch.zeros_like(padded)
        slopes[at] = slopes_PD
        padded.requires_grad_()
        weights = {name: w.detach().requires_grad_() for name, w in self.weights.items()}
        found = torch.autograd.grad(self._compute(weights, padded), [padded, *weights.values()], slopes)
        self._update(dict(zip(weights, found[1:], strict=True)), experts_P.unique())
        return found[0][at]

    def _compute(self, weights: dict[str, Tensor], padded_ERD: Tensor) -> Tensor:
        y: Tensor = vmap(lambda w, x: functional_call(self._block, w, (x,)))(weights, padded_ERD)
        return y

    def _padded(self, rows_PD: Tensor, experts_P: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Rows by expert, [E, R, D], zeros where there are fewer, and where each row is."""
        count = len(self.updates)
        order = experts_P.argsort(stable=True)
        sizes = torch.bincount(experts_P, minlength=count)
        within = torch.empty_like(order)
        within[order] = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[experts_P[order]]
        padded = torch.zeros(count, int(sizes.max()), rows_PD.shape[1])
        padded[experts_P, within] = rows_PD
        return padded, (experts_P, within)

    @torch.no_grad()
    def _update(self, gradients: dict[str, Tensor], hit: Tensor) -> None:
        o = self._optimizer
        picked = {name: g[hit] for name, g in gradients.items()}
        if o.clip_norm:
            norm = sum(g.flatten(1).square().sum(1) for g in picked.values())
            assert isinstance(norm, Tensor)
            factor = (o.clip_norm / norm.sqrt().clamp_min(1e-12)).clamp_max(1.0)
            picked = {name: g * _along(factor, g) for name, g in picked.items()}
        self.updates[hit] += 1
        counts = self.updates[hit].double()
        for name, gradient in picked.items():
            if o.name == "sgd":
                self.weights[name][hit] -= o.lr * gradient
                continue
            mean = self._mean[name][hit].lerp(gradient, 1 - o.beta1)
            square = self._square[name][hit] * o.beta2 + (1 - o.beta2) * gradient.square()
            self._mean[name][hit], self._square[name][hit] = mean, square
            root = (square / _along(1 - o.beta2**counts, gradient)).sqrt() + o.eps
            self.weights[name][hit] -= o.lr * mean / _along(1 - o.beta1**counts, gradient) / root


def uids_of(run: RunFile, layer: int) -> list[Uid]:
    """Uids of a layer's experts, in the order of the stack."""
    grid = grid_of(run)
    return [grid.uid(layer * grid.places + i) for i in range(grid.places)]


def _along(factor: Tensor, values: Tensor) -> Tensor:
    return factor.to(values.dtype).view(-1, *[1] * (values.ndim - 1))
