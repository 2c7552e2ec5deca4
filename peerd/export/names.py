"""Names in an exported model: converts names in a run's layers to the plain names of a GPT in torch, and makes its
config.

A gpt's `block3.attention.qkv.weight` becomes `blocks.3.attn.qkv.weight`. Blocks that share weights inside a stage are
exported once, numbered from 0, with the number of times that each is applied. In a user's own model `layer3.NAME`
becomes `layers.3.NAME`, the name in `torch.nn.ModuleDict({"layers": torch.nn.ModuleList(function(run))})`. Models from
users' own loops keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from peerd.core.errors import ConfigError
from peerd.data.tokenizer import load_vocabulary
from peerd.model.run_record import settings_of
from peerd.model.shapes.model_shapes import feed_forward_width
from peerd.model.stage.partition import spans
from peerd.run.runfile import RunFile

_PREFIXES: Final = ("param/", "buffer/")  # of a stage's state; the rest is the optimizer's
_ENDS: Final = {"embed.table": "embed.weight", "head.norm.gain": "norm.weight", "head.out.weight": "head.weight"}
_PARTS: Final = {
    "attention_norm.gain": "attn_norm.weight",
    "attention.qkv.weight": "attn.qkv.weight",
    "attention.out.weight": "attn.out.weight",
    "feed_norm.gain": "mlp_norm.weight",
    "gate.weight": "mlp.gate.weight",  # of a block with experts
    "feed.up.weight": "mlp.up.weight",
    "feed.down.weight": "mlp.down.weight",
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a gpt that have weights of their own: their numbers in the run, and how often each is applied."""

    starts: list[int]
    repeats: list[int]


def blocks_of(run: RunFile) -> Blocks:
    """The blocks of the run's model, in order."""
    if not run.model.share_layers:
        return Blocks(list(range(run.model.layers)), [1] * run.model.layers)
    stages = spans(run)
    return Blocks([stage.start for stage in stages], [len(stage) for stage in stages])


def architecture(run: RunFile) -> dict[str, Any]:
    """The part of `config.json` that describes the model."""
    model, vocab = run.model, load_vocabulary(run.model.vocab)
    found: dict[str, Any] = {"kind": model.kind, "dtype": model.dtype, "context": model.context}
    found |= {"vocab_size": vocab.size, "separator": vocab.separator}
    if model.kind != "gpt":
        return {**found, "settings": settings_of(run)}
    sizes = {"d_model": model.d_model, "heads": model.heads, "d_feed": feed_forward_width(model.d_model)}
    return {**found, **sizes, "repeats": blocks_of(run).repeats}


def parameters_in(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's parameters and buffers in a stage's state, by the run's names."""
    return {
        name.removeprefix(prefix): tensor
        for prefix in _PREFIXES
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def plainly_named(run: RunFile, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by their plain names; raises ConfigError for a name that the run's model does not have."""
    if run.loop is not None:
        return dict(tensors)
    if run.model.kind != "gpt":
        return {re.sub(r"^layer(\d+)\.", r"layers.\1.", name): tensor for name, tensor in tensors.items()}
    numbers = {start: index for index, start in enumerate(blocks_of(run).starts)}
    return {_plain(name, numbers): tensor for name, tensor in tensors.items()}


def _plain(name: str, numbers: Mapping[int, int]) -> str:
    if name in _ENDS:
        return _ENDS[name]
    found = re.fullmatch(r"block(\d+)\.(.+)", name)
    if found is None or int(found[1]) not in numbers or found[2] not in _PARTS:
        raise ConfigError(f"the checkpoints contain {name[:100]}, which is no parameter of a gpt with these settings")
    return f"blocks.{numbers[int(found[1])]}.{_PARTS[found[2]]}"
