"""Layers of experts in plain PyTorch, which replace the feed-forward in `model.py` beside this file.

A gate scores the places of each dimension of a grid; an expert's score is the sum over its coordinates. Each token's
output is the mean of its best experts' outputs, weighted by the softmax of their scores. Missing experts are never
chosen. Shapes: N tokens, D width, P places of the grid, K experts of a token.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeepExpert(nn.Module):
    """Feed-forward D - F - F - D with layer norm and ReLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.up_norm = nn.Linear(width, hidden), nn.LayerNorm(hidden)
        self.across, self.across_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.across_norm(self.across(F.relu(self.up_norm(self.up(x))))))
        y: Tensor = self.down(h)
        return y


class ShallowExpert(nn.Module):
    """Feed-forward D - F - D with ReLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.relu(self.up(x)))
        return y


class ExpertsLayer(nn.Module):
    """Mixture of the experts of one layer: vectors [..., D] to [..., D]. `c` is the part "experts" of config.json."""

    def __init__(self, width: int, layer: int, c: dict[str, Any]) -> None:
        super().__init__()
        self.grid, self.top_k = list(c["grid"]), c["top_k"]
        self.gate = nn.Linear(width, sum(self.grid), bias=False)
        kind = DeepExpert if c["block"] == "ffn" else ShallowExpert
        self.names = ["-".join(map(str, at)) for at in itertools.product(*map(range, self.grid))]
        missing = {tuple(name.split(".")) for name in c["missing"]}  # layer, and coordinates
        self.missing = [n for n, name in enumerate(self.names) if (str(layer), *name.split("-")) in missing]
        there = set(range(len(self.names))) - set(self.missing)
        self.experts = nn.ModuleDict({self.names[n]: kind(width, c["hidden"]) for n in sorted(there)})

    def forward(self, x: Tensor) -> Tensor:
        samples = x.flatten(0, -2)
        scores = samples.new_zeros(len(samples), 1)
        for part in self.gate(samples).split(self.grid, 1):  # sums over the dimensions, row by row: [N, P]
            scores = (scores[:, :, None] + part[:, None, :]).flatten(1)
        scores[:, self.missing] = -torch.inf
        best, chosen = scores.topk(min(self.top_k, len(self.experts)))  # [N, K]
        weights, y = best.softmax(1), torch.zeros_like(samples)
        for number in sorted(set(chosen.flatten().tolist())):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            found = self.experts[self.names[number]](samples[row])
            y.index_add_(0, row, weights[row, slot, None] * found)
        return y.view_as(x)
