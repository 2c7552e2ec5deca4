"""A trained language model in plain PyTorch, beside its weights: `python model.py "a prompt"` continues a text.

Needs torch and safetensors (and tokenizers, if there is a tokenizer.json). A decoder-only transformer without biases:
rotary positions, RMS norms, GeGLU or, instead of it, experts (model_experts.py). Shapes: B texts, T tokens of each, H
heads, W features of a head.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

Past = tuple[Tensor, Tensor]  # keys and values [B, H, T, W] of the previous tokens in a layer


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate each pair of neighbouring features of x [B, H, T, W] by an angle proportional to the position."""
    pairs = torch.view_as_complex(x.to(turns.dtype.to_real()).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class CausalAttention(nn.Module):
    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, turns: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, turns), rotate(k, turns)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=-2), torch.cat([past[1], v], dim=-2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.out(y.transpose(1, 2).flatten(-2)), (k, v)


class GatedFeedForward(nn.Module):
    def __init__(self, d_model: int, d_feed: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 2 * d_feed, bias=False)
        self.down = nn.Linear(d_feed, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        y: Tensor = self.down(F.gelu(gate) * value)
        return y


def feed_forward(config: dict[str, Any], block: int, mixture: Callable[..., nn.Module] | None) -> nn.Module:
    """The feed-forward of a block, or its experts. `mixture`: class of the experts, or None if from the file beside
    this one.
    """
    experts = config.get("experts")
    if not experts or block < experts["first"]:
        return GatedFeedForward(config["d_model"], config["d_feed"])
    made: nn.Module = (mixture or importlib.import_module("model_experts").ExpertsLayer)(
        config["d_model"], block - experts["first"], experts
    )
    return made


class TransformerBlock(nn.Module):
    def __init__(self, config: dict[str, Any], mlp: nn.Module) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config["d_model"], eps=1e-6)
        self.attn = CausalAttention(config["d_model"], config["heads"])
        self.mlp_norm = nn.RMSNorm(config["d_model"], eps=1e-6)
        self.mlp = mlp

    def forward(self, x: Tensor, turns: Tensor, past: Past | None) -> tuple[Tensor, Past]:
        y, past = self.attn(self.attn_norm(x), turns, past)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), past


class GPT(nn.Module):
    """Tokens [B, T] to logits [B, T, vocabulary]. Block n is applied `repeats[n]` times, with the same weights."""

    def __init__(self, config: dict[str, Any], mixture: Callable[..., nn.Module] | None = None) -> None:
        super().__init__()
        self.context, self.separator, self.repeats = config["context"], config["separator"], config["repeats"]
        self.width = config["d_model"] // config["heads"]
        self.embed = nn.Embedding(config["vocab_size"], config["d_model"])
        feeds = (feed_forward(config, block, mixture) for block in range(len(self.repeats)))
        self.blocks = nn.ModuleList(TransformerBlock(config, feed) for feed in feeds)
        self.norm = nn.RMSNorm(config["d_model"], eps=1e-6)
        self.head = nn.Linear(config["d_model"], config["vocab_size"], bias=False)

    def forward(self, tokens: Tensor, cache: list[Past] | None = None) -> Tensor:
        """`cache`: a list, empty at first. The first call takes any number of tokens, later calls one token each."""
        start = cache[0][0].shape[-2] if cache else 0
        angles = torch.arange(start, start + tokens.shape[1], dtype=torch.float64)[:, None] * 10_000.0 ** (
            -torch.arange(0, self.width, 2, dtype=torch.float64) / self.width
        )
        x = self.embed(tokens)
        wide = torch.complex128 if x.dtype == torch.float64 else torch.complex64
        turns = torch.polar(torch.ones_like(angles), angles).to(x.device, wide)
        layers = [block for block, times in zip(self.blocks, self.repeats, strict=True) for _ in range(times)]
        for n, block in enumerate(layers):
            x, past = block(x, turns, cache[n] if start and cache else None)
            if cache is not None:
                cache[n : n + 1] = [past]
        logits: Tensor = self.head(self.norm(x))
        return logits


@torch.no_grad()
def generate(
    model: Any, tokens: list[int], count: int, *, temperature: float = 0.8, top_k: int = 40, seed: int = 0
) -> Iterator[int]:
    """Yield `count` tokens that continue `tokens`; the separator of documents is never among them.

    The model sees at most `model.context` tokens: when the window is full, it continues with the newest half of it.
    """
    tokens = list(tokens) or [model.separator or 0]
    start, generator = max(0, len(tokens) - model.context), torch.Generator().manual_seed(seed)
    cache: list[Past] = []
    for _ in range(count):
        if len(tokens) - start > model.context:
            start, cache = len(tokens) - max(1, model.context // 2), []
        window = torch.tensor([tokens[-1:] if cache else tokens[start:]], device=next(model.parameters()).device)
        logits = model(window, cache)[0, -1].double().cpu()
        if model.separator is not None:
            logits[model.separator] = -torch.inf
        if 0 < top_k < len(logits):
            logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
        chances = torch.softmax(logits / (temperature or 1.0), dim=-1)
        drawn = torch.multinomial(chances, 1, generator=generator) if temperature > 0 else logits.argmax()
        tokens.append(int(drawn))
        yield tokens[-1]


def load(folder: Path) -> tuple[GPT, Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Load the model of a folder, and the functions from text to tokens and back."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    with torch.device("meta"):
        model = GPT(config).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    if config["tokenizer"] == "bytes":
        return model, lambda text: list(text.encode()), lambda tokens: bytes(tokens).decode(errors="replace")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / config["tokenizer"]))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return model, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.decode


if __name__ == "__main__":
    model, encode, decode = load(Path(__file__).parent)
    prompt = " ".join(sys.argv[1:])
    print(prompt + decode(list(generate(model, encode(prompt), 400))))
