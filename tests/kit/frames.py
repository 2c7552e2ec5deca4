"""Frame headers by hand: with fields that no encoder writes, and with the checksum that belongs to them."""

from __future__ import annotations

import struct
import zlib

from peerd.codec.format.frame import MAGIC, VERSION
from peerd.core.limits import FRAME_DIMS

_START_BYTES = 8


def raw_header(
    dtype: int,
    coding: int,
    shape: tuple[int, ...],
    size: int,
    *,
    magic: bytes = MAGIC,
    version: int = VERSION,
    flags: int = 0,
    block_log2: int = 0,
) -> bytes:
    """A header with these fields and a checksum that fits them."""
    start = struct.pack("<2sBBBBBB", magic, version, dtype, coding, flags, block_log2, len(shape))
    body = start + struct.pack(f"<{len(shape) + 1}Q", *shape, size)
    return body + struct.pack("<I", zlib.crc32(body))


def mended(data: bytes) -> bytes:
    """The same bytes, where whatever looks like a frame header has the checksum that fits it."""
    mending = bytearray(data)
    at = mending.find(MAGIC)
    while 0 <= at <= len(mending) - _START_BYTES:
        dims = mending[at + _START_BYTES - 1]
        end = at + _START_BYTES + 8 * dims + 8
        if dims <= FRAME_DIMS and end + 4 <= len(mending):
            mending[end : end + 4] = struct.pack("<I", zlib.crc32(mending[at:end]))
            at = end + 2
        at = mending.find(MAGIC, at + 2)
    return bytes(mending)
