"""Loss of a model on a text file, cut into samples as in training.

The tokens of the whole file, with a separator after each document, are cut into windows of `context` tokens. Each token
is predicted from those before it in its window. The last token of a window is predicted there and is the first of the
next window. Every token except the first is thus predicted once; the last window may be shorter. The loss is the mean
over all predicted tokens. If all windows are full, it equals the mean over samples that training reports as its
validation loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from peerd.core.errors import ConfigError
from peerd.data.readers import Field, TextPiece, read_jsonl, read_parquet, read_text
from peerd.data.skipped_rows import RefusedRows
from peerd.data.text_stream import DataFile, FilePart
from peerd.data.tokenizer import Tokenizer
from peerd.export.loaded_model import LoadedModel

BATCH_TOKENS: Final = 16_384  # of the windows in one batch
LARGEST_BATCH: Final = 64
KINDS: Final = {".jsonl": "jsonl", ".parquet": "parquet"}  # by file name extension; all others are text
COMPRESSED: Final = (".gz", ".bz2", ".xz", ".zst")
_FIELD: Final = Field("text", "the field that is read")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of an evaluation so far. `nats`: sum over the predicted tokens."""

    nats: float
    tokens: int  # predicted
    text_bytes: int  # of the text read so far
    batch: int  # windows per batch

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the text, for any tokenizer."""
        return self.nats / math.log(2) / self.text_bytes


def evaluate(loaded: LoadedModel, path: Path, progress: Callable[[Evaluation], None] | None = None) -> Evaluation:
    """Loss of the model on a file's text; raises ConfigError if the text is too short or the loss is not finite."""
    context, vocab = loaded.config.context, loaded.vocab
    batch = max(1, min(LARGEST_BATCH, BATCH_TOKENS // context))
    counted = _Counted(path, vocab)
    nats, tokens = 0.0, 0
    for windows in _windows(counted.tokens(), context, batch):
        nats += _nats(loaded, windows)
        tokens += windows.shape[0] * (windows.shape[1] - 1)
        if progress is not None:
            progress(Evaluation(nats, tokens, max(1, counted.text_bytes), batch))
    if not tokens:
        raise ConfigError(f"{path} has {counted.text_bytes} bytes of text: too little to predict a token")
    if not math.isfinite(nats):
        raise ConfigError(f"the model's loss on {path} is not finite: this model has diverged")
    return Evaluation(nats, tokens, max(1, counted.text_bytes), batch)


@torch.no_grad()
def _nats(loaded: LoadedModel, windows: Tensor) -> float:
    windows = windows.to(loaded.device)
    logits_BLV = loaded.model(windows[:, :-1])
    return float(F.cross_entropy(logits_BLV.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").double().sum())


class _Counted:
    """The tokens of a file; counts the bytes of text read."""

    def __init__(self, path: Path, vocab: Tokenizer) -> None:
        self.text_bytes = 0
        self._path, self._vocab = path, vocab

    def tokens(self) -> Iterator[npt.NDArray[Any]]:
        """Arrays of tokens, as they are read."""
        try:
            for piece in _pieces(self._path):
                assert isinstance(piece.text, bytes)
                self.text_bytes += len(piece.text)
                yield self._vocab.encode(piece.text)
                if piece.ends and self._vocab.separator is not None and piece.text:
                    yield np.asarray([self._vocab.separator])
        except OSError as error:
            raise ConfigError(f"{self._path} can't be read: {error.strerror or error}") from error


def _pieces(path: DataFile) -> Iterator[TextPiece]:
    name = path.name.lower()
    plain = next((name.removesuffix(end) for end in COMPRESSED if name.endswith(end)), name)
    kind, whole = KINDS.get(Path(plain).suffix, "text"), FilePart()
    if kind == "jsonl":
        return read_jsonl(path, whole, None, _FIELD, RefusedRows())
    if kind == "parquet":
        return read_parquet(path, whole, None, _FIELD, RefusedRows())
    return read_text(path, whole, None)


def _windows(runs: Iterator[npt.NDArray[Any]], context: int, batch: int) -> Iterator[Tensor]:
    """Windows int64 [up to batch, context + 1]; neighbours share a token. A shorter last window is yielded alone."""
    held = np.empty(0, dtype=np.int64)
    for run in runs:
        held = np.concatenate([held, run.astype(np.int64)])
        while len(held) > batch * context:
            yield _cut(held, batch, context)
            held = held[batch * context :]
    whole = max(0, len(held) - 1) // context
    if whole:
        yield _cut(held, whole, context)
        held = held[whole * context :]
    if len(held) > 1:
        yield torch.from_numpy(held[None].copy())


def _cut(tokens: npt.NDArray[Any], count: int, context: int) -> Tensor:
    view = np.lib.stride_tricks.sliding_window_view(tokens[: count * context + 1], context + 1)[::context]
    return torch.from_numpy(view.copy())
