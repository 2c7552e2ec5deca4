"""A model of one's own with a layer that is not finite for samples with a certain byte, forward or backward."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SPOILT: Final = 255  # this token; the texts of `exact.write_texts` have none above 251
MODEL: Final = """
import torch
from torch import nn

SPOILT, HOW = 255, "{how}"

class Nan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bad):
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (bad,) = ctx.saved_tensors
        return torch.where(bad, torch.full_like(gradient, float("nan")), gradient), None

class Embed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)

    def forward(self, tokens):
        marked = (tokens == SPOILT).to(self.embedding.weight.dtype)
        return self.embedding(tokens) + 1000.0 * marked.unsqueeze(-1)

class Spoiling(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        bad = (x.abs() > 500).any(-1, keepdim=True).any(-2, keepdim=True)
        y = self.linear(x)
        return Nan.apply(y, bad) if HOW == "backward" else torch.where(bad, torch.full_like(y, float("nan")), y)

def layers(run):
    width = run.model.d_model
    return [Embed(width), Spoiling(width), nn.Linear(width, 256)]
"""


def write_spoilt(folder: Path, how: str) -> str:
    """Write the model into `folder`; its kind. `how`: where it fails, "forward" or "backward"."""
    (folder / f"spoilt_{how}.py").write_text(MODEL.replace("{how}", how))
    return f"spoilt_{how}.py:layers"


def spoil_texts(folder: Path, every: int) -> None:
    """Put the byte into the texts in `folder`, one in so many."""
    for path in sorted(folder.glob("*.txt")):
        text = bytearray(path.read_bytes())
        text[every // 2 :: every] = bytes([SPOILT]) * len(text[every // 2 :: every])
        path.write_bytes(text)
