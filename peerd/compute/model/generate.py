"""Text from a model: one token after another, each drawn from what the model gives for those before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from peerd.compute.tokenizer import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleStyle:
    """Sampling settings: `temperature` 0 takes the likeliest token; `top_k` 0 considers all."""

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


@torch.no_grad()
def generate(
    model: nn.Module, vocab: Vocabulary, context: int, prompt: str, count: int, style: SampleStyle | None = None
) -> str:
    """`prompt` continued by `count` tokens; the model sees the last `context` of them. The prompt is not repeated.

    `model` maps int64 [1, L] to logits [1, L, V]. The same seed gives the same text. Documents do not end: the
    separator is never drawn.
    """
    style = style or SampleStyle()
    start = vocab.encode(prompt.encode()).astype(np.int64).tolist()
    tokens: list[int] = start or [vocab.separator or 0]
    before = len(tokens)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(style.seed)
    for _ in range(count):
        logits_V = model(torch.tensor([tokens[-context:]], device=device))[0, -1].double().cpu()
        if vocab.separator is not None:
            logits_V[vocab.separator] = -torch.inf
        tokens.append(_draw(logits_V, style, generator))
    return vocab.decode(tokens[before:])


def _draw(logits_V: Tensor, style: SampleStyle, generator: torch.Generator) -> int:
    if style.temperature <= 0:
        return int(logits_V.argmax())
    if 0 < style.top_k < len(logits_V):
        least = logits_V.topk(style.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    probabilities_V = torch.softmax(logits_V / style.temperature, dim=-1)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))
