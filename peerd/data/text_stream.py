"""A text or JSONL file opened for reading from any position, with decompression if needed.

Positions count bytes of the text. The text size of a compressed file is unknown before its end, so its held-out part is
spread over many spans (`spans`). A file that is not text is rejected by its first bytes, whether it is local or remote.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO, Final, Literal, NamedTuple, Protocol

from peerd.core.errors import ConfigError
from peerd.data.files.compressed_file import CompressedFile, compression_of

_LOOK_BYTES: Final = 8192  # at the start of a file
_SKIP_BYTES: Final = 1 << 20
_FIRST_SPAN: Final = 4096  # bytes of text, of which the end is held out
_LONGEST_SPAN: Final = 16 << 20
_KNOWN: Final = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"\x1f\x9d": "compressed by compress",
    b"PAR1": "Parquet (kind: parquet)",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"%PDF-": "PDF",
    b"\x93NUMPY": "a NumPy array",
}


class DataFile(Protocol):
    """A Path, or a file that is fetched when opened; its str is its location."""

    @property
    def name(self) -> str: ...

    def open(self, mode: Literal["rb"]) -> BinaryIO: ...


class TextSpan(NamedTuple):
    """Bytes, or rows of Parquet, from `start` up to `end`."""

    start: int
    end: int


class FilePart(NamedTuple):
    """The part of each file that is read. `holdout`: the held-out share of the file, or 0 for the whole file."""

    holdout: float = 0.0
    held_out: bool = False  # select the held-out part

    def span(self, size: int) -> TextSpan:
        """The part of a file with `size` bytes or rows; its end is held out."""
        cut = size - int(size * self.holdout)
        return TextSpan(cut, size) if self.held_out else TextSpan(0, cut)

    def spans(self, size: int | None) -> Iterator[TextSpan]:
        """The part of a text file as spans, in order; endless if `size` is None (unknown)."""
        if size is not None or not self.holdout:
            yield self.span(sys.maxsize if size is None else size)
            return
        start, length = 0, _FIRST_SPAN
        while True:
            first, last = self.span(length)
            if last > first:
                yield TextSpan(start + first, start + last)
            elif length == _LONGEST_SPAN:
                return  # not a byte of any span is held out
            start, length = start + length, min(2 * length, _LONGEST_SPAN)


class TextStream:
    """An open text file. `size`: bytes of its text; None if unknown."""

    def __init__(self, text: BinaryIO, size: int | None) -> None:
        self.size = size
        self._text, self._at = text, 0

    def go_to(self, at: int) -> None:
        """Move to a position; a compressed file reads up to it, and cannot go back."""
        if self.size is not None:
            self._at = self._text.seek(at)
            return
        assert at >= self._at
        while at > self._at and self.read(min(at - self._at, _SKIP_BYTES)):
            pass

    def read(self, count: int) -> bytes:
        """The next `count` bytes; fewer at the end of the file."""
        return self._counted(self._text.read(count))

    def readline(self, most: int) -> bytes:
        """The rest of the line, at most `most` bytes; empty at the end of the file."""
        return self._counted(self._text.readline(most))

    def _counted(self, text: bytes) -> bytes:
        self._at += len(text)
        return text


@contextlib.contextmanager
def open_text(file: DataFile) -> Iterator[TextStream]:
    """Open the text of a file; raises ConfigError if it is not text, OSError if it cannot be read."""
    with file.open("rb") as stream:
        begin = stream.read(_LOOK_BYTES)
        compression = compression_of(begin)
        if compression is None:
            _check_text(begin, file)
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            yield TextStream(stream, size)
            return
        stream.seek(0)
        with io.BufferedReader(CompressedFile(stream, compression, str(file)), 1 << 16) as text:
            _check_text(text.peek(_LOOK_BYTES)[:_LOOK_BYTES], file)
            yield TextStream(text, None)


def _check_text(begin: bytes, file: DataFile) -> None:
    """Raise ConfigError if `begin`, the first bytes of a file, is not text; text contains no bytes of value 0."""
    what = next((name for magic, name in _KNOWN.items() if begin.startswith(magic)), None)
    if what is None and b"\0" in begin:
        what = "binary: it has bytes of value 0"
    if what is not None:
        allowed = "UTF-8 text, plain or compressed by gzip, bzip2, xz or zstd"
        raise ConfigError(f"{file}: is not a text file ({what}); allowed: {allowed}")
