"""One file of text in pieces: plain text, JSONL, Parquet. A piece is what lies between two cursors.

Reading from a cursor always gives the same piece and the same next cursor, so a reader can go on from any cursor it
kept. Never more than one piece (of Parquet: 64 rows) is in memory. A document ends with the file (text), the line
(JSONL) or the row (Parquet). What is wrong with a file is a ConfigError that names file and line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, BinaryIO, Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from peerd.core.errors import ConfigError

PIECE_BYTES: Final = 1 << 16  # of a text file; small, so that the first sample is there at once
LINE_BYTES: Final = 64 << 20  # a longer JSONL line is a broken file
ROWS: Final = 64  # of Parquet, read at once

# Where the part to read starts and ends, of a file with so many bytes (text, JSONL) or rows (Parquet).
Part = Callable[[int], tuple[int, int]]
Text = bytes | npt.NDArray[np.integer[Any]]  # UTF-8, or token numbers already


class DataFile(Protocol):
    """A Path, or a file that is fetched when it is opened; its str says where it lies."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"]) -> BinaryIO: ...


class Field(NamedTuple):
    """The name of a JSONL field or a Parquet column, and the key of the run file that says so."""

    name: str
    key: str


class Cursor(NamedTuple):
    """A place in one file: `at` counts bytes (text, JSONL) or rows (Parquet), `line` the lines before it (JSONL)."""

    at: int = 0
    line: int = 0


class TextPiece(NamedTuple):
    """Text that starts at a cursor, and whether its document ends with it."""

    start: Cursor
    text: Text
    ends: bool


def read_text(file: DataFile, part: Part, cursor: Cursor | None) -> Iterator[TextPiece]:
    """The whole part is one document."""
    with file.open("rb") as stream:
        start, end = part(os.fstat(stream.fileno()).st_size)
        at = start if cursor is None else cursor.at
        stream.seek(at)
        while at < end and (text := stream.read(min(PIECE_BYTES, end - at))):
            if at + len(text) < end:
                text = _whole_words(text)
                stream.seek(at + len(text))
            yield TextPiece(Cursor(at), text, at + len(text) >= end)
            at += len(text)


def _whole_words(text: bytes) -> bytes:
    """Up to the last line end, else the last space, else the last whole character: a tokenizer must not see the cut."""
    for mark in (b"\n", b" "):
        if cut := text.rfind(mark) + 1:
            return text[:cut]
    cut = len(text)
    while cut > len(text) - 3 and text[cut - 1] & 0b1100_0000 == 0b1000_0000:  # continuation bytes
        cut -= 1
    return text[: cut - 1] if text[cut - 1] & 0b1100_0000 == 0b1100_0000 and cut > 1 else text


def read_jsonl(file: DataFile, part: Part, cursor: Cursor | None, field: Field) -> Iterator[TextPiece]:
    """Each line is an object with a string under `field`; a line belongs to the part in which it starts."""
    with file.open("rb") as stream:
        start, end = part(os.fstat(stream.fileno()).st_size)
        at, line = (0, 0) if cursor is None else cursor
        stream.seek(at)
        while at < end and (raw := stream.readline(LINE_BYTES)):
            if at >= start and raw.strip():
                yield TextPiece(Cursor(at, line), _document(raw, field, f"{file}, line {line + 1}"), True)
            at, line = at + len(raw), line + 1


def _document(raw: bytes, field: Field, where: str) -> bytes:
    """The text of one JSONL line."""
    if len(raw) >= LINE_BYTES:
        raise ConfigError(f"{where}: longer than {LINE_BYTES >> 20} MB")
    try:
        tree = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not JSON ({error}); expected an object with text under {field.name!r}") from None
    text = tree.get(field.name) if isinstance(tree, dict) else None
    if not isinstance(text, str):
        found = f"the fields {', '.join(sorted(tree))[:200]}" if isinstance(tree, dict) else type(tree).__name__
        raise ConfigError(f"{where}: expected an object with text under {field.name!r} ({field.key}), found {found}")
    return text.encode(errors="replace")


def read_parquet(file: DataFile, part: Part, cursor: Cursor | None, field: Field) -> Iterator[TextPiece]:
    """Each row's `field` is a document; rows without text are left out."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("kind parquet needs the pyarrow package: pip install 'peerd[data]'") from error
    try:
        with file.open("rb") as stream, parquet.ParquetFile(stream) as table:
            _check_column(table, field, file)
            start, end = part(table.metadata.num_rows)
            yield from _rows(table, field, start if cursor is None else cursor.at, end)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: not a Parquet file that can be read: {error}") from error


def _check_column(table: Any, field: Field, file: DataFile) -> None:
    schema = table.schema_arrow
    if field.name not in schema.names:
        raise ConfigError(f"{file}: no column {field.name!r} ({field.key}); there are {', '.join(schema.names)[:200]}")
    kind = str(schema.field(field.name).type)
    if kind not in ("string", "large_string", "string_view"):
        raise ConfigError(f"{file}: column {field.name!r} ({field.key}) holds {kind}, not text")


def _rows(table: Any, field: Field, start: int, end: int) -> Iterator[TextPiece]:
    """Rows `start` to `end`, row group by row group; whole groups before `start` are not read."""
    row = 0
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if row + rows <= start:
            row += rows
            continue
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[field.name]):
            for text in batch.column(0).to_pylist():
                if row >= end:
                    return
                if row >= start and text:
                    yield TextPiece(Cursor(row), text.encode(errors="replace"), True)
                row += 1
