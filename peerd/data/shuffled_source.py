"""An endless stream of samples from one source: files in random order, cut into samples, shuffled.

The text of all documents, with separators, is cut into samples of context + 1 tokens. The last token of a sample is the
first of the next one, so every token is predicted once. Samples are shuffled in blocks of `shuffle_buffer`. While the
samples of one block are returned in random order, the next block is read, one or two samples for each sample returned,
so there is never a long wait, and at most two blocks are in memory. The first block is smaller if reading it would take
long, and the next ones double in size, so the first sample is available quickly. After the last file a new epoch starts
in a new order, so a small source can supply any number of samples.

The random numbers depend on a name (`SampleCutter.name`), so equal names give equal samples. A position is a few
numbers: the start of the current block and how many of its samples were taken. Resuming reads that block again (at most
`block_samples`), not the stream from its start. ConfigErrors name file and line.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from peerd.core.errors import ConfigError
from peerd.data.corpus import Corpus, Documents, Split
from peerd.data.files.remote_files import RemoteFileCache
from peerd.data.readers import Cursor, TextPiece
from peerd.data.skipped_rows import SkippedRows
from peerd.data.tokenizer import Tokenizer
from peerd.data.user_dataset import Dataset
from peerd.run.runfile import SourceSection

_LOOK_AHEAD: Final = 32  # pieces between two attempts to fetch the next file ahead

Tokens = npt.NDArray[Any]


class _Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Start of a sample: `skip` tokens into the piece at a cursor, in the n-th file of an epoch's order."""

    epoch: int = 0
    file: int = 0
    cursor: tuple[int, int] | None = None
    skip: int = 0


class StreamPosition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Position of a stream: number, size and start of the current block, and how many of its samples were taken."""

    block: int
    size: int
    taken: int
    place: _Place


class _Run(NamedTuple):
    """The tokens of one piece, their start, and their file."""

    place: _Place
    tokens: Tokens
    file: str = ""


class _Sample(NamedTuple):
    """The tokens of one sample, and its start: a token of the piece at a cursor of a file."""

    tokens: Tokens
    file: str
    cursor: tuple[int, int]
    token: int

    @property
    def origin(self) -> str:
        """The start as text: the line of a JSONL file, or the byte or row of the piece, and the token."""
        at, line = self.cursor
        piece = f"line {line + 1}" if line else f"text at {at}"
        return f"{self.file}, {piece}, token {self.token}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCutter:
    """Settings for cutting a source into samples."""

    vocab: Tokenizer
    context: int
    split: Split
    holdout: float
    first_samples: int  # of the first block
    block_samples: int  # of later blocks
    name: str  # of the random numbers
    key: str  # of the source in the run file, for messages
    cache: RemoteFileCache | None = None
    strict: bool = False  # a row without text raises ConfigError


class SourceStream:
    """Samples of one source. `next` reads files, so call it on a worker."""

    def __init__(self, source: SourceSection, cutting: SampleCutter) -> None:
        self._documents = _documents(source, cutting)
        self._cutting = cutting
        self._vocab = cutting.vocab
        self._path = source.path
        self._most = cutting.block_samples
        self.go_to(StreamPosition(block=0, size=min(cutting.first_samples, self._most), taken=0, place=_Place()))

    @property
    def files(self) -> int:
        """Number of files that the stream reads."""
        return len(self._documents.files)

    @property
    def skipped(self) -> SkippedRows:
        """Rows that were left out."""
        return self._documents.skipped

    def position(self) -> StreamPosition:
        """The stream's position."""
        return StreamPosition(self._block, self._size, self._taken, self._block_place)

    def has(self, position: StreamPosition) -> bool:
        """True if `position` is valid for this stream, as far as can be checked without reading."""
        place = position.place
        if place.epoch < 0 or position.block < 0 or not 0 <= place.file < self.files or place.skip < 0:
            return False
        return 0 <= position.taken <= position.size <= self._most and (place.cursor is None or min(place.cursor) >= 0)

    def go_to(self, position: StreamPosition) -> None:
        """Move to `position`: read its block, and drop the samples that were taken."""
        self._runs = self._tokens(position.place)
        self._run = _Run(position.place, np.empty(0, dtype=np.uint8))
        self._at = position.place.skip  # tokens of self._run used up
        self._fresh: list[_Sample] = []  # the part of the next block read so far
        self.origin = ""  # where the last taken sample begins, for messages
        self._block, self._size = position.block, position.size
        self._fresh_place = position.place
        self._fill(position.size)
        self._begin(position.block, position.size)
        for _ in range(position.taken):
            self.next()

    def _begin(self, block: int, size: int) -> None:
        """Make the block just read the current one, shuffled, and start to read the next block."""
        self._block, self._size, self._taken = block, size, 0
        self._block_place, self._ready, self._fresh = self._fresh_place, self._fresh, []
        self._rng(f"block {block}").shuffle(self._ready)
        self._next_size = min(2 * size, self._most)
        self._locate()
        self._fresh_place = self._here()

    def next(self) -> Tokens:
        """The next sample, context + 1 tokens.

        Reads enough samples each time that the next block is complete when this one is used up.
        """
        if not self._ready:
            self._begin(self._block + 1, self._next_size)
        sample = self._ready.pop()
        self._taken += 1
        self._fill(-(-self._next_size * self._taken // self._size))
        self.origin = sample.origin
        return sample.tokens

    def _fill(self, count: int) -> None:
        """Read until the next block has `count` samples."""
        while len(self._fresh) < count:
            self._fresh.append(self._cut())

    def _cut(self) -> _Sample:
        """The next context + 1 tokens of the text; the last one is also the first of the following sample."""
        parts: list[Tokens] = []
        missing = self._cutting.context + 1
        self._locate()
        first, token = self._run, self._at
        while True:
            self._locate()
            part = self._run.tokens[self._at : self._at + missing]
            parts.append(part)
            missing -= len(part)
            if missing == 0:
                self._at += len(part) - 1
                return _Sample(np.concatenate(parts), first.file, first.place.cursor or (0, 0), token)
            self._at += len(part)

    def _locate(self) -> None:
        """Move to the next piece of text if the current one has no tokens left."""
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
            order, after = self._order(epoch), self._order(epoch + 1)[0]
            empty = file == 0 and cursor is None
            for number in range(file, len(order)):
                start = None if cursor is None else Cursor(*cursor)
                read = self._documents.files[order[number]]
                following = [*order, after][number + 1]
                for count, piece in enumerate(self._documents.read(read, start, epoch)):
                    if count % _LOOK_AHEAD == 0:
                        self._documents.fetch_ahead(self._documents.files[following])
                    tokens = self._encode(piece)
                    yield _Run(_Place(epoch, number, (piece.start.at, piece.start.line)), tokens, str(read))
                    empty = empty and len(tokens) == 0
                cursor = None
            if empty:
                text, key = f"{self._cutting.split} text", self._cutting.key
                why = f"; {self.skipped.count} rows were left out: {self.skipped.first}" if self.skipped.count else ""
                raise ConfigError(f"{key}.path {self._path}: no {text} in the {self.files} files that were read{why}")
            epoch, file = epoch + 1, 0

    def _order(self, epoch: int) -> list[int]:
        """Indices of the files of an epoch, in reading order."""
        order = list(range(self.files))
        self._rng(f"epoch {epoch}").shuffle(order)
        return order

    def _encode(self, piece: TextPiece) -> Tokens:
        text, separator = piece.text, self._vocab.separator
        tokens = self._vocab.encode(text) if isinstance(text, bytes) else self._checked(text, piece.start)
        if piece.ends and separator is not None:
            return np.append(tokens, np.asarray(separator, dtype=tokens.dtype))
        return tokens

    def _checked(self, tokens: Tokens, at: Cursor) -> Tokens:
        """Token numbers from the user's dataset; raises ConfigError if the vocabulary lacks one."""
        size = self._vocab.size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            raise ConfigError(
                f"{self._cutting.key}.path {self._path}, document {at.at}: has tokens {int(tokens.min())} to "
                f"{int(tokens.max())}; the vocabulary has 0 to {size - 1}"
            )
        return tokens.astype(np.min_scalar_type(size - 1))

    def _rng(self, purpose: str) -> random.Random:
        return random.Random(hashlib.sha256(f"{self._cutting.name} {purpose}".encode()).digest())


def _documents(source: SourceSection, cutting: SampleCutter) -> Documents:
    if source.kind == "dataset":
        return Dataset(source.path, f"{cutting.key}.path", cutting.split, cutting.name)
    return Corpus(source, cutting.holdout, cutting.split, cutting.key, cutting.cache, strict=cutting.strict)
