"""A model of one's own for peerd: what `model.kind: configs/own_model.py:layers` names. See configs/README.md.

Each layer takes and gives float [samples, tokens, width]; the first takes token numbers [samples, tokens], the last
gives a score for each token of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mix(nn.Module):
    """A gated unit with a causal convolution over time: each place sees itself and the seven before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.over_time = nn.Conv1d(width, width, kernel_size=8, groups=width)
        self.gate = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        before = functional.pad(self.norm(x).transpose(1, 2), (7, 0))
        value, gate = self.gate(self.over_time(before).transpose(1, 2)).chunk(2, dim=-1)
        return x + value * torch.sigmoid(gate)


def layers(run: Any) -> list[nn.Module]:
    """The layers of the whole model; `run` is the run file, `run.model.d_model` the width between layers."""
    width = run.model.d_model
    return [nn.Embedding(256, width), *(Mix(width) for _ in range(run.model.layers)), nn.Linear(width, 256)]
