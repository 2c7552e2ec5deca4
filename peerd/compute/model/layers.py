"""The layers of the language model: embedding, transformer block, head. Plain and readable, nothing else.

Every layer is a function of its input and its parameters alone: no dropout, no buffers that change, so a forward
pass that is computed again for the backward pass gives the same bits. No biases. Parameters are left empty here;
`partition.py` fills them.

Shapes: B samples, L tokens, D d_model, H heads, W = D / H width of a head, N = 2 for queries and keys, F width of
the feed-forward, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peerd.core.model.model_shapes import feed_forward_width

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
    """Unit complex numbers [L, 1, 1, W/2], one per position and pair of features; computed in fp64, then rounded."""
    pairs = torch.arange(0, width, 2, dtype=torch.float64)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), ROTARY_BASE ** (-pairs / width))
    table = torch.polar(torch.ones_like(angles), angles)[:, None, None, :]
    return table.to(device, dtype.to_complex())


def rotate(x_BLNHW: Tensor) -> Tensor:
    """Rotary positions (RoFormer): each pair of neighbouring features turns by an angle that grows with L.

    As one complex product: twice as fast on a CPU, forward and backward, as sines and cosines by halves. Of values
    in 16 bits it gives fp32: there are no complex numbers of such.
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
    """Gated feed-forward (Shazeer 2020): one half opens the gate for the other."""

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
    """One transformer layer, normalised before each part."""

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
    """One transformer layer whose feed-forward is done by experts elsewhere: attention, and the gate that scores them.

    `scores`: places in all dimensions of the experts' grid together.
    """

    def __init__(self, d_model: int, heads: int, scores: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(d_model)
        self.attention = Attention(d_model, heads)
        self.feed_norm = RMSNorm(d_model)
        self.gate = nn.Linear(d_model, scores, bias=False)

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """The sum so far, and what goes to the experts; their mean is added to the sum."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
        return x_BLD, self.feed_norm(x_BLD)


class Embedding(nn.Module):
    """Tokens [B, L] to vectors [B, L, D]."""

    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(vocab, d_model))

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return F.embedding(tokens_BL, self.table)


class Head(nn.Module):
    """Final normalisation and the matrix that gives logits [B, L, V]; not tied to the embedding, which may be far."""

    def __init__(self, d_model: int, vocab: int) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model)
        self.out = nn.Linear(d_model, vocab, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        logits_BLV: Tensor = self.out(self.norm(x_BLD))
        return logits_BLV
