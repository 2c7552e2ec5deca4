"""Two small models without their experts: a classifier of digits, and a language model of bytes. And their data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from peerd.compute.model.layers import Attention, RMSNorm
from peerd.core.experts.grid import grid_of
from peerd.core.run.runfile import RunFile
from scripts.learning.trainers import Batch, Leaves

TEXT_BYTES = 4 << 20


class _Parts(nn.Module):
    """Parts of a model, each a method."""

    def forward(self, part: str, *given: Any) -> Any:
        return getattr(self, part)(*given)


class _DigitParts(_Parts):
    def __init__(self, run: RunFile, pixels: int, classes: int) -> None:
        super().__init__()
        width, grid = run.model.d_model, grid_of(run)
        self.into = nn.Linear(pixels, width)
        self.gates = nn.ModuleList(nn.Linear(width, sum(grid.sides), bias=False) for _ in range(grid.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(grid.layers + 1))
        self.out = nn.Linear(width, classes)

    def enter(self, x: Tensor) -> Tensor:
        h: Tensor = self.into(x)
        return h

    def junction(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        samples = self.norms[layer](h)
        return h, samples, self.gates[layer](samples)

    def logits(self, h: Tensor) -> Tensor:
        found: Tensor = self.out(self.norms[-1](h))
        return found


class _TextParts(_Parts):
    def __init__(self, run: RunFile) -> None:
        super().__init__()
        width, grid = run.model.d_model, grid_of(run)
        self.table = nn.Parameter(torch.randn(256, width) * 0.5)
        self.attention_norms = nn.ModuleList(RMSNorm(width) for _ in range(grid.layers))
        self.attentions = nn.ModuleList(Attention(width, run.model.heads) for _ in range(grid.layers))
        self.feed_norms = nn.ModuleList(RMSNorm(width) for _ in range(grid.layers))
        self.gates = nn.ModuleList(nn.Linear(width, sum(grid.sides), bias=False) for _ in range(grid.layers))
        self.head_norm = RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for name, p in self.named_parameters():
            if name.endswith("gain"):
                nn.init.ones_(p)
        nn.init.normal_(self.head.weight, std=0.02)

    def enter(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table)

    def junction(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = h + self.attentions[layer](self.attention_norms[layer](h))
        samples = self.feed_norms[layer](h).flatten(0, 1)
        return h, samples, self.gates[layer](samples)

    def logits(self, h: Tensor) -> Tensor:
        found: Tensor = self.head(self.head_norm(h)).flatten(0, 1)
        return found


class SmallTrunk:
    """A `Trunk` of such parts; its starting weights follow from the seed."""

    def __init__(self, parts: _Parts) -> None:
        self._parts = parts
        self.parameters: Leaves = dict(parts.named_parameters())

    @classmethod
    def of_digits(cls, run: RunFile) -> SmallTrunk:
        torch.manual_seed(run.seed)
        return cls(_DigitParts(run, 64, 10))

    @classmethod
    def of_text(cls, run: RunFile) -> SmallTrunk:
        torch.manual_seed(run.seed)
        return cls(_TextParts(run))

    def enter(self, leaves: Leaves, x: Tensor) -> Tensor:
        h: Tensor = functional_call(self._parts, leaves, ("enter", x))
        return h

    def junction(self, leaves: Leaves, layer: int, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = functional_call(self._parts, leaves, ("junction", layer, h))
        return found

    def loss(self, leaves: Leaves, h: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(leaves, h), targets.flatten())

    def accuracy(self, leaves: Leaves, h: Tensor, targets: Tensor) -> Tensor:
        return (self.logits(leaves, h).argmax(1) == targets).float().mean()

    def logits(self, leaves: Leaves, h: Tensor) -> Tensor:
        found: Tensor = functional_call(self._parts, leaves, ("logits", h))
        return found


class Digits:
    """scikit-learn's digits: 1,437 to train on, 360 to test on."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        x = torch.tensor(found.data, dtype=torch.float32) / 8 - 1
        y = torch.tensor(found.target, dtype=torch.int64)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        self.train, self.test = (x[order[360:]], y[order[360:]]), (x[order[:360]], y[order[:360]])

    def batches(self, size: int, seed: int) -> Iterator[Batch]:
        stream = torch.Generator().manual_seed(seed)
        while True:
            for part in torch.randperm(len(self.train[0]), generator=stream).split(size):
                if len(part) == size:
                    yield self.train[0][part], self.train[1][part]


class Text:
    """Sources of Python's standard library, as bytes; the last twentieth is held out."""

    def __init__(self, context: int) -> None:
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        whole = b"\n".join(file.read_bytes() for file in files)[:TEXT_BYTES]
        found = torch.from_numpy(np.frombuffer(whole, dtype=np.uint8).astype(np.int64))
        cut = len(found) * 19 // 20
        self._train, self._held_out, self._context = found[:cut], found[cut:], context

    def batches(self, size: int, seed: int) -> Iterator[Batch]:
        stream = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self._train) - self._context - 1, (size,), generator=stream)
            yield self._cut(self._train, starts)

    def held_out(self, size: int) -> Batch:
        step = (len(self._held_out) - self._context - 1) // size
        return self._cut(self._held_out, torch.arange(size) * step)

    def _cut(self, source: Tensor, starts: Tensor) -> Batch:
        rows = source[starts[:, None] + torch.arange(self._context + 1)]
        return rows[:, :-1], rows[:, 1:]
