"""Text of a file compressed by gzip, bzip2, xz or zstd, read sequentially.

The file may come from anyone. It is decompressed in small steps, so that memory stays bounded at any compression ratio;
xz and zstd files that need a large window are rejected. Concatenated streams are read one after the other.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zlib
from typing import Any, BinaryIO, Final

import zstandard

from peerd.core.errors import ConfigError

_MAGICS: Final = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "bzip2": re.compile(rb"BZh[1-9]1AY&SY"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}
_FEED_BYTES: Final = 4096  # read at once: zstd expands that to at most 128 MiB
_OUT_BYTES: Final = 1 << 20  # output of the other formats at once
_WINDOW_BYTES: Final = 128 << 20  # as `zstd --long` needs; `xz -9` needs half


class _Zstd:
    """One compressed stream. `is_hungry`: it needs input; `unused_data`: the bytes after it once `eof` is True."""

    is_hungry = True

    def __init__(self) -> None:
        self._own: Any = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()

    @property
    def eof(self) -> bool:
        return bool(self._own.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._own.unused_data)

    def decompress(self, data: bytes) -> bytes:
        return bytes(self._own.decompress(data))


class _Gzip(_Zstd):
    def __init__(self) -> None:
        self._own = zlib.decompressobj(wbits=31)

    @property
    def is_hungry(self) -> bool:  # type: ignore[override]
        return not self._own.unconsumed_tail

    def decompress(self, data: bytes) -> bytes:
        return bytes(self._own.decompress(self._own.unconsumed_tail + data, _OUT_BYTES))


class _Bzip2(_Zstd):
    def __init__(self) -> None:
        self._own = bz2.BZ2Decompressor()

    @property
    def is_hungry(self) -> bool:  # type: ignore[override]
        return bool(self._own.needs_input)

    def decompress(self, data: bytes) -> bytes:
        return bytes(self._own.decompress(data, _OUT_BYTES))


class _Xz(_Bzip2):
    def __init__(self) -> None:
        self._own = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=2 * _WINDOW_BYTES)


_FORMATS: Final[dict[str, type[_Zstd]]] = {"gzip": _Gzip, "bzip2": _Bzip2, "xz": _Xz, "zstd": _Zstd}
_FAULTS: Final = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError, zstandard.ZstdError)


def compression_of(begin: bytes) -> str | None:
    """The compression format of a file that begins with these bytes, or None if it is not one of the supported ones."""
    return next((name for name, magic in _MAGICS.items() if magic.match(begin)), None)


class CompressedFile(io.RawIOBase):
    """The decompressed bytes of `stream`."""

    def __init__(self, stream: BinaryIO, format: str, where: str) -> None:
        """`where`: the file's name, for messages."""
        super().__init__()
        self._stream, self._format, self._where = stream, format, where
        self._part = _FORMATS[format]()
        self._out = memoryview(b"")
        self._left = b""  # read from the file, but not decompressed yet
        self._fed = False  # the current stream has received input

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the available text; raises ConfigError for bytes that cannot be decompressed."""
        while not self._out and self._advance():
            pass
        count = min(len(self._out), len(buffer))
        buffer[:count], self._out = self._out[:count], self._out[count:]
        return count

    def _advance(self) -> bool:
        """Decompress some more; returns False at the end of the file."""
        if self._part.eof:
            self._left, self._part, self._fed = self._part.unused_data, _FORMATS[self._format](), False
        if not self._part.is_hungry:
            return self._decompress(b"")
        data, self._left = self._left or self._stream.read(_FEED_BYTES), b""
        if not data:
            if self._fed:
                raise ConfigError(f"{self._where}: its {self._format} data ends early; the file is truncated")
            return False
        if not self._fed:
            data = data.lstrip(b"\0")  # padding between two streams, and after the last
        return not data or self._decompress(data)

    def _decompress(self, data: bytes) -> bool:
        self._fed = True
        try:
            self._out = memoryview(self._part.decompress(data))
        except _FAULTS as error:
            raise ConfigError(f"{self._where}: its {self._format} data cannot be read: {error}") from error
        return True
