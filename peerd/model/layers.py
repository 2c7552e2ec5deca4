"""Layers of the language model: embedding, transformer block and head, in plain torch.

The output of a layer depends only on its input and parameters (no dropout, no changing buffers), so recomputing a
forward pass for the backward pass gives the same bits. No biases. Parameters are left uninitialized here;
`partition.py` fills them.

Shapes: B samples, L tokens, D d_model, H heads, W = D / H width of a head, N = 2 for queries and keys, F width of the
feed-forward, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerd.model.shapes.model_shapes import feed_forward_width

ROTARY_BASE = 10_000.0  # longest wavelength of the rotary positions (RoFormer, section 3.2.2)
NORM_EPS = 1e-6


class RMSNorm(nn.Module):
    """Root mean square normalisation (Zhang & Sennrich 2019) with a gain per feature."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(d_model))

    def forward(self, x_BLD: Tensor) -> Tensor:
        return F.rms_norm(x_BLD, self.gain.shape, self.gain, NORM_EPS)


@functools.lru_cache(maxsize=32)
def rotary_table(length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Unit complex numbers [L, 1, 1, W/2] per position and feature pair; computed in fp64, then rounded to `dtype`."""
    pairs = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), ROTARY_BASE ** (-pairs / width))
    table = torch.polar(torch.ones_like(angles), angles)[:, None, None, :]
    return table.to(device, dtype.to_complex())


def rotate(x_BLNHW: Tensor) -> Tensor:
    """Rotary positions (RoFormer): rotates each pair of neighbouring features by an angle proportional to the position.

    Computed as one complex product: on a CPU twice as fast, forward and backward, as sines and cosines by halves.
    16-bit inputs give fp32, because torch has no complex numbers for them.
    """
    if x_BLNHW.dtype.itemsize == 2:
        x_BLNHW = x_BLNHW.float()
    B, L, N, H, W = x_BLNHW.shape
    pairs = torch.view_as_complex(x_BLNHW.reshape(B, L, N, H, W // 2, 2))
    return torch.view_as_real(pairs * rotary_table(L, W, x_BLNHW.dtype, x_BLNHW.device)).flatten(-2)


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        B, L, D = x_BLD.shape
        qkv = self.qkv(x_BLD).view(B, L, 3, self.heads, D // self.heads)
        q_BHLW, k_BHLW = rotate(qkv[:, :, :2]).permute(2, 0, 3, 1, 4)
        y_BHLW = F.scaled_dot_product_attention(q_BHLW, k_BHLW, qkv[:, :, 2].transpose(1, 2), is_causal=True)
        out_BLD: Tensor = self.out(y_BHLW.transpose(1, 2).reshape(B, L, D))
        return out_BLD


class GeGLU(nn.Module):
    """Gated feed-forward (Shazeer 2020): the GELU of one half of the features multiplies the other half."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        width = feed_forward_width(d_model)
        self.up = nn.Linear(d_model, 2 * width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        gate_BLF, value_BLF = self.up(x_BLD).chunk(2, dim=-1)
        y_BLD: Tensor = self.down(F.gelu(gate_BLF) * value_BLF)
        return y_BLD


class Block(nn.Module):
    """One transformer layer, with a norm before attention and one before the feed-forward."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(d_model)
        self.attention = Attention(d_model, heads)
        self.feed_norm = RMSNorm(d_model)
        self.feed = GeGLU(d_model)

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
        y_BLD: Tensor = x_BLD + self.feed(self.feed_norm(x_BLD))
        return y_BLD


class ExpertBlock(nn.Module):
    """Transformer layer whose feed-forward is computed by remote experts: attention, and the gate that scores the
    experts.

    `scores`: number of scores per token, the sum of the sides of the experts' grid.
    """

    def __init__(self, d_model: int, heads: int, scores: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(d_model)
        self.attention = Attention(d_model, heads)
        self.feed_norm = RMSNorm(d_model)
        self.gate = nn.Linear(d_model, scores, bias=False)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the residual sum, to which the mean of the experts' outputs is added, and the experts' input."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
        return x_BLD, self.feed_norm(x_BLD)


class Embedding(nn.Module):
    """Maps tokens [B, L] to vectors [B, L, D]."""

    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(vocab, d_model))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return F.embedding(tokens_BL, self.table)


class Head(nn.Module):
    """Final norm and projection to logits [B, L, V]. Not tied to the embedding, which may be on another peer."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model)
        self.out = nn.Linear(d_model, vocab, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        logits_BLV: Tensor = self.out(self.norm(x_BLD))
        return logits_BLV
