"""A peer's endless stream of training samples: files in random order, cut into samples, shuffled.

The text of all documents, with separators, is cut into samples of context + 1 tokens; a sample's last token is the
next one's first, so every token is predicted once. Samples are shuffled in blocks of `shuffle_buffer`: while one
block is handed out in random order the next is read, one or two samples for each that leaves, so there is never a
long wait, and at most two blocks are in memory. The first block is cut short where reading it would take long, and
the next double in size, so the first sample is there at once. After the last file a new epoch starts in a new order.

Everything follows from (seed, peer, split): the same three give the same samples. A position is a few numbers: where
the block at hand begins and how much of it is used up. Resuming reads that block again (at most `shuffle_buffer`
samples), not the stream from its start. ConfigErrors name file and line.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from peerd.compute.corpus import Corpus, Split
from peerd.compute.readers import Cursor
from peerd.compute.tokens import Vocabulary
from peerd.core.errors import ConfigError
from peerd.core.runfile import DataSection

FIRST_BLOCK_S: Final = 0.25  # what reading the first block may take; a short first block is from few files
FIRST_BLOCK_SAMPLES: Final = 256  # at least

Tokens = npt.NDArray[Any]


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a sample begins: `skip` tokens into the piece at a cursor of the n-th file of an epoch's order."""

    epoch: int = 0
    file: int = 0
    cursor: tuple[int, int] | None = None
    skip: int = 0


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a stream stands: the block at hand, its size and where it begins, and how many of it were taken."""

    block: int
    size: int
    taken: int
    place: _Place


class _Run(NamedTuple):
    """The tokens of one piece and where they begin."""

    place: _Place
    tokens: Tokens


class SampleStream:
    """Samples of one peer. `take` reads files: call it on a worker."""

    def __init__(
        self, section: DataSection, vocab: Vocabulary, context: int, seed: int, peer: str, split: Split = "train"
    ) -> None:
        """`peer`: any name; peers of different names see the files in different orders."""
        self._corpus = Corpus(section, split)
        self._vocab = vocab
        self._context = context
        self._most = section.shuffle_buffer
        self._path, self._split = section.path, split
        self._name = f"peerd data {seed} {peer} {split}"
        first = max(FIRST_BLOCK_SAMPLES, int(FIRST_BLOCK_S * vocab.tokens_per_s / context))
        self._start(Position(block=0, size=min(first, self._most), taken=0, place=_Place()))

    @property
    def files(self) -> int:
        """How many files the stream reads."""
        return len(self._corpus.files)

    def take(self, count: int) -> Tensor:
        """The next `count` samples, int64 [count, context + 1]."""
        rows = [self._next() for _ in range(count)]
        if not rows:
            return torch.empty(0, self._context + 1, dtype=torch.int64)
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def position(self) -> dict[str, Any]:
        """Where the stream stands, as a few plain numbers fit for JSON."""
        position = Position(self._block, self._size, self._taken, self._block_place)
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(position))
        return plain

    def resume(self, position: Mapping[str, Any]) -> None:
        """Go on from a `position()` of a stream with the same files and settings; ConfigError for anything else."""
        try:
            found = msgspec.convert(dict(position), Position)
        except msgspec.ValidationError as error:
            raise ConfigError(f"not a position of a sample stream: {error}") from error
        place = found.place
        if not (0 <= found.taken <= found.size <= self._most and 0 <= place.file < self.files and place.skip >= 0):
            raise ConfigError("this position of a sample stream does not belong to these files and settings")
        self._start(found)

    def _start(self, position: Position) -> None:
        """Read the block of `position` and use up what was taken of it."""
        self._runs = self._tokens(position.place)
        self._run = _Run(position.place, np.empty(0, dtype=np.uint8))
        self._at = position.place.skip  # tokens of self._run used up
        self._fresh: list[Tokens] = []  # the next block, as far as it was read
        self._block, self._size = position.block, position.size
        self._fresh_place = position.place
        self._fill(position.size)
        self._begin(position.block, position.size)
        for _ in range(position.taken):
            self._next()

    def _begin(self, block: int, size: int) -> None:
        """Hand out what was read, in random order, and start to read the block after it."""
        self._block, self._size, self._taken = block, size, 0
        self._block_place, self._ready, self._fresh = self._fresh_place, self._fresh, []
        self._rng(f"block {block}").shuffle(self._ready)
        self._next_size = min(2 * size, self._most)
        self._locate()
        self._fresh_place = self._here()

    def _next(self) -> Tokens:
        """One sample out, so many in that the next block is there when this one is used up."""
        if not self._ready:
            self._begin(self._block + 1, self._next_size)
        sample = self._ready.pop()
        self._taken += 1
        self._fill(-(-self._next_size * self._taken // self._size))
        return sample

    def _fill(self, count: int) -> None:
        """Read until the next block has `count` samples."""
        while len(self._fresh) < count:
            self._fresh.append(self._cut())

    def _cut(self) -> Tokens:
        """The next context + 1 tokens of the text; the last of them will be the first of the sample after."""
        parts: list[Tokens] = []
        missing = self._context + 1
        while True:
            self._locate()
            part = self._run.tokens[self._at : self._at + missing]
            parts.append(part)
            missing -= len(part)
            if missing == 0:
                self._at += len(part) - 1
                return np.concatenate(parts)
            self._at += len(part)

    def _locate(self) -> None:
        """Have at least one token of the present run left."""
        while self._at >= len(self._run.tokens):
            self._at -= len(self._run.tokens)
            self._run = next(self._runs)

    def _here(self) -> _Place:
        place = self._run.place
        return _Place(place.epoch, place.file, place.cursor, self._at)

    def _tokens(self, place: _Place) -> Iterator[_Run]:
        """The endless text from `place` on, piece by piece."""
        epoch, file, cursor = place.epoch, place.file, place.cursor
        while True:
            order = list(range(self.files))
            self._rng(f"epoch {epoch}").shuffle(order)
            empty = file == 0 and cursor is None
            for number in range(file, len(order)):
                start = None if cursor is None else Cursor(*cursor)
                for piece in self._corpus.read(self._corpus.files[order[number]], start):
                    tokens = self._encode(piece.text, piece.ends)
                    yield _Run(_Place(epoch, number, (piece.start.at, piece.start.line)), tokens)
                    empty = empty and len(tokens) == 0
                cursor = None
            if empty:
                raise ConfigError(
                    f"data.path {self._path}: no {self._split} text in the {self.files} files that were read"
                )
            epoch, file = epoch + 1, 0

    def _encode(self, text: bytes, ends: bool) -> Tokens:
        tokens = self._vocab.encode(text)
        if ends and self._vocab.separator is not None:
            return np.append(tokens, np.asarray(self._vocab.separator, dtype=tokens.dtype))
        return tokens

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(hashlib.sha256(f"{self._name} {purpose}".encode()).digest())
