"""Reads a text file in pieces: plain text, JSONL, Parquet. A piece is the text between two cursors.

Reading from a cursor always gives the same piece and the same next cursor, so a reader can resume from any cursor that
it kept. At most one piece (for Parquet: 64 rows) is in memory. A document ends with the file (text), the line (JSONL)
or the row (Parquet). A fault of the file raises ConfigError with file and line; a row without text is reported to the
read's `RowFaults`, which decides whether reading continues.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from peerd.core.errors import ConfigError
from peerd.data.skipped_rows import RowFaults
from peerd.data.text_stream import DataFile, FilePart, TextStream, open_text

PIECE_BYTES: Final = 1 << 16  # of a text file; small, so that the first sample is available quickly
LINE_BYTES: Final = 64 << 20  # a longer JSONL line is a broken file
ROWS: Final = 64  # Parquet rows read at once

Text = bytes | npt.NDArray[np.integer[Any]]  # UTF-8, or token numbers


class Field(NamedTuple):
    """Name of a JSONL field or a Parquet column, and the key in the run file that sets it."""

    name: str
    key: str


class Cursor(NamedTuple):
    """A position in one file: `at` counts bytes (text, JSONL) or rows (Parquet), `line` counts the lines before it
    (JSONL).
    """

    at: int = 0
    line: int = 0


class TextPiece(NamedTuple):
    """Text that starts at a cursor. `ends`: its document ends with it."""

    start: Cursor
    text: Text
    ends: bool


def read_text(file: DataFile, part: FilePart, cursor: Cursor | None) -> Iterator[TextPiece]:
    """Read a plain text file; each span of the part is one document."""
    first = 0 if cursor is None else cursor.at
    with open_text(file) as stream:
        for start, end in part.spans(stream.size):
            if end <= first:
                continue
            at, begin = max(start, first), b""
            stream.go_to(at)
            while at < end:
                wanted = min(PIECE_BYTES, end - at)
                is_last = at + wanted == end
                begin += stream.read(wanted + (not is_last) - len(begin))  # one byte more: does the file continue?
                if not begin:
                    return
                ends = is_last or len(begin) <= wanted
                text = begin[:wanted] if ends else _whole_words(begin[:wanted])
                yield TextPiece(Cursor(at), text, ends)
                at, begin = at + len(text), begin[len(text) :]


def _whole_words(text: bytes) -> bytes:
    """Cut after the last line end, else the last space or whole character, so that no tokenizer sees a split word."""
    for mark in (b"\n", b" "):
        if cut := text.rfind(mark) + 1:
            return text[:cut]
    cut = len(text)
    while cut > len(text) - 3 and text[cut - 1] & 0b1100_0000 == 0b1000_0000:  # continuation bytes
        cut -= 1
    return text[: cut - 1] if text[cut - 1] & 0b1100_0000 == 0b1100_0000 and cut > 1 else text


class _BadRow(Exception):
    """A row without text. `empty`: its text is null."""

    def __init__(self, fault: str, *, empty: bool = False) -> None:
        super().__init__(fault)
        self.empty = empty

    def report(self, where: str, faults: RowFaults) -> None:
        """Report this fault of the row at `where`."""
        (faults.empty if self.empty else faults.broken)(f"{where}: {self}")


def read_jsonl(
    file: DataFile, part: FilePart, cursor: Cursor | None, field: Field, faults: RowFaults
) -> Iterator[TextPiece]:
    """Read lines that are objects with a string under `field`; a line belongs to the part in which it starts."""
    with open_text(file) as stream:
        spans, start, end = part.spans(stream.size), 0, 0
        at, line = (0, 0) if cursor is None else cursor
        stream.go_to(at)
        while True:
            while at >= end:
                following = next(spans, None)
                if following is None:
                    return
                start, end = following
            if not (raw := stream.readline(LINE_BYTES)):
                return
            size = len(raw) + _rest_of_line(stream, raw)
            if at >= start and raw.strip():
                try:
                    text = _document(raw, field)
                except _BadRow as fault:
                    fault.report(f"{file}, line {line + 1}", faults)
                else:
                    faults.good()
                    yield TextPiece(Cursor(at, line), text, True)
            at, line = at + size, line + 1


def _rest_of_line(stream: TextStream, raw: bytes) -> int:
    """Skip the rest of a line whose first bytes are `raw`; returns the number of bytes skipped."""
    rest, last = 0, raw
    while len(last) >= LINE_BYTES and not last.endswith(b"\n"):
        last = stream.readline(LINE_BYTES)
        rest += len(last)
    return rest


def _document(raw: bytes, field: Field) -> bytes:
    """The text of one JSONL line."""
    if len(raw) >= LINE_BYTES:
        raise _BadRow(f"longer than {LINE_BYTES >> 20} MB")
    tree = _json(raw, field)
    text = tree.get(field.name) if isinstance(tree, dict) else None
    if not isinstance(text, str):
        fields = ", ".join(sorted(tree))[:200] if isinstance(tree, dict) else ""
        found = f"the fields {fields}" if fields else type(tree).__name__
        empty = isinstance(tree, dict) and field.name in tree and text is None
        found = "null" if empty else found
        raise _BadRow(f"expected an object with text under {field.name!r} ({field.key}), found {found}", empty=empty)
    return text.encode(errors="replace")


def _json(raw: bytes, field: Field) -> Any:
    """A line's value. Accepts NaN and Infinity, which many programs write."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            return json.loads(raw)
        except (ValueError, RecursionError):
            raise _BadRow(f"not JSON ({error}); expected an object with text under {field.name!r}") from None


def read_parquet(
    file: DataFile, part: FilePart, cursor: Cursor | None, field: Field, faults: RowFaults
) -> Iterator[TextPiece]:
    """Read rows; each row's `field` is a document."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("kind parquet needs the pyarrow package: pip install 'peerd[data]'") from error
    try:
        with file.open("rb") as stream, parquet.ParquetFile(stream) as table:
            _check_column(table, field, file)
            start, end = part.span(table.metadata.num_rows)
            for row, value in _rows(table, field, start if cursor is None else cursor.at, end):
                try:
                    text = _utf8(value)
                except _BadRow as fault:
                    fault.report(f"{file}, row {row + 1}", faults)
                else:
                    faults.good()
                    if text:
                        yield TextPiece(Cursor(row), text, True)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{file}: not a Parquet file that can be read: {error}") from error


def _check_column(table: Any, field: Field, file: DataFile) -> None:
    schema = table.schema_arrow
    if field.name not in schema.names:
        raise ConfigError(f"{file}: no column {field.name!r} ({field.key}); there are {', '.join(schema.names)[:200]}")
    kind = str(schema.field(field.name).type)
    if kind not in ("string", "large_string", "string_view"):
        raise ConfigError(f"{file}: column {field.name!r} ({field.key}) contains {kind}, not text")


def _utf8(value: bytes | None) -> bytes:
    """The text of one row, checked, because Parquet writers may store invalid UTF-8."""
    if value is None:
        raise _BadRow("the text is null", empty=True)
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise _BadRow(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    return value


def _rows(table: Any, field: Field, start: int, end: int) -> Iterator[tuple[int, bytes | None]]:
    """Rows `start` to `end`, by row group; skips whole groups before `start` without reading them."""
    row, as_bytes = 0, import_module("pyarrow").large_binary()
    for group in range(table.num_row_groups):
        rows = table.metadata.row_group(group).num_rows
        if row + rows <= start:
            row += rows
            continue
        for batch in table.iter_batches(batch_size=ROWS, row_groups=[group], columns=[field.name]):
            for value in batch.column(0).cast(as_bytes).to_pylist():
                if row >= end:
                    return
                if row >= start:
                    yield row, value
                row += 1
