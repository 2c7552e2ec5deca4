"""A model of one's own with buffers, a batch norm between an embedding and a head, for `model.kind`."""

from __future__ import annotations

from pathlib import Path

NORMED = """
import torch
from torch import nn

class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.passes = self.passes + 1
        return self.norm(x.transpose(1, 2)).transpose(1, 2)

def layers(run):
    width = run.model.d_model
    embedding = nn.Embedding(256, width)
    with torch.no_grad():
        embedding.weight.mul_(30).add_(50)  # fresh running statistics would be far off
    return [embedding, Norm(width), nn.Linear(width, width), nn.Linear(width, 256)]
"""


def write_normed(folder: Path) -> str:
    """Write it into `folder`; the model's kind."""
    (folder / "normed.py").write_text(NORMED)
    return "normed.py:layers"
