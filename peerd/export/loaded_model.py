"""An exported model loaded from its folder, for continuing a text and measuring the loss on one.

A gpt is peerd's own copy of the folder's `model.py`, with a cache of keys and values. A user's own model is built by
the function that the user's run file names; it has no cache and computes the whole window for each token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn

from peerd.core.errors import ConfigError
from peerd.data.tokenizer import ByteTokenizer, Tokenizer, load_vocabulary
from peerd.export.export import need_gpt_or_run
from peerd.export.folder import TOKENIZER, ExportConfig, load_gpt, load_weights, read_config
from peerd.export.standalone import generate
from peerd.model.stage.partition import whole_model
from peerd.run.runfile import RunFile


class LanguageModel(Protocol):
    """The interface of a model that `standalone.generate` needs."""

    context: int
    separator: int | None

    def __call__(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Uncached:
    """A model that recomputes the whole window for each token: int64 [B, L] to logits [B, L, V]."""

    def __init__(self, model: nn.Module, context: int, separator: int | None) -> None:
        self.model, self.context, self.separator = model, context, separator

    def __call__(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor:
        logits_BLV: Tensor = self.model(tokens)
        return logits_BLV

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute, and its vocabulary."""

    config: ExportConfig
    model: LanguageModel
    vocab: Tokenizer
    device: str


def load_export(folder: Path, device: str = "cpu", run: RunFile | None = None) -> LoadedModel:
    """Load the model of an exported folder. `run`: for a user's own model, the run file that names its code."""
    config = read_config(folder)
    need_gpt_or_run(config, run, folder)
    vocab = load_vocabulary("bytes" if config.tokenizer == "bytes" else str(folder / TOKENIZER))
    if vocab.size != config.vocab_size:
        raise ConfigError(f"{folder}: the tokenizer has {vocab.size} tokens, but the model has {config.vocab_size}")
    if config.kind == "gpt":
        return LoadedModel(config, load_gpt(folder, config).to(device), vocab, device)
    assert run is not None
    model = _own(folder, config, run).to(device)
    return LoadedModel(config, Uncached(model, config.context, vocab.separator), vocab, device)


def _own(folder: Path, config: ExportConfig, run: RunFile) -> nn.Module:
    """The layers that the user's function returns, with the folder's weights."""
    local = msgspec.structs.replace(run.model, dtype=config.dtype)
    model = whole_model(msgspec.structs.replace(run, model=local))
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    tensors = load_weights(folder, _shapes(parameters), config.dtype, _shapes(buffers))
    with torch.no_grad():
        for name, mine in {**parameters, **buffers}.items():
            if (plain := _plain(name)) in tensors:
                mine.copy_(tensors[plain])
    return model.eval().requires_grad_(False)


def _plain(name: str) -> str:
    return f"layers.{name.removeprefix('layer')}"


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {_plain(name): tuple(tensor.shape) for name, tensor in tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling settings. `temperature` 0 picks the most likely token; `top_k` 0 samples from all tokens."""

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


def write_text(
    model: LanguageModel, vocab: Tokenizer, prompt: str, count: int, style: SamplingOptions | None = None
) -> Iterator[str]:
    """Continue `prompt` by `count` tokens; yields the new text in pieces of whole characters as they are generated.

    A prompt longer than the context is cut at its start.
    """
    style = style or SamplingOptions()
    tokens = [int(token) for token in vocab.encode(prompt.encode(errors="replace"))]
    pieces = TextPieces(vocab)
    for token in generate(model, tokens, count, temperature=style.temperature, top_k=style.top_k, seed=style.seed):
        if piece := pieces.feed(token):
            yield piece
    if piece := pieces.end():
        yield piece


class TextPieces:
    """Incremental decoding of tokens: a character is returned once its last byte has arrived.

    Joined, the pieces equal `vocab.decode` of all tokens; invalid UTF-8 becomes the replacement character.
    """

    def __init__(self, vocab: Tokenizer) -> None:
        self._vocab = vocab
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace") if isinstance(vocab, ByteTokenizer) else None
        self._tokens: list[int] = []
        self._given = 0  # characters returned so far

    def feed(self, token: int) -> str:
        """The text that this token completes."""
        if self._bytes is not None:
            return self._bytes.decode(bytes([token]))
        self._tokens.append(token)
        text = self._vocab.decode(self._tokens)
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._rest(text)

    def end(self) -> str:
        """The remaining text after the last token."""
        if self._bytes is not None:
            return self._bytes.decode(b"", final=True)
        return self._rest(self._vocab.decode(self._tokens))

    def _rest(self, text: str) -> str:
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece
