"""TensorFrame: a tensor on the wire, as a small strict header and payload bytes. No torch, no arithmetic.

Header, little-endian: magic "pT" | version 2 | dtype | coding | flags (bit 0: lossless) | log2 of the block size (0 if
the coding has no blocks) | number of dims, one byte each; each dim (8 bytes); the payload's length (8); CRC-32 of all
these bytes (4). The payload is sent separately, little-endian, C order. Its length follows from dtype, shape, coding
and block alone, so it is checked before memory is allocated:

    none, bf16, fp16   the values, 2 bytes each if rounded
    blockwise          scales (4 bytes per block) | CRC-32 of the scales (4) | codes; empty for a tensor without values
    lossless           one of these payloads, cut into chunks of LOSSLESS_CHUNK_BYTES that are compressed one by one:
                       length (4; top bit set: stored uncompressed), then the chunk's bytes. The total length varies
                       within fixed bounds.

A payload may still be produced while it is sent (`ReadyBytes`); the receiver sees no difference.

A hostile peer may send: another version; unknown codes, flags or blocks; too many dims; dims whose product overflows or
is hidden by a zero; a wrong length; a small payload that claims to decompress into a huge one (the decompressed size is
bounded here, and rpc/methods/message_codec accounts for it as received bytes). Each raises `ProtocolViolation`.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from peerd.codec.format.blockwise import BLOCKS, CODES, SCALE_BYTES, code_bytes, scale_count
from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.limits import FRAME_BYTES, FRAME_DIMS, FRAME_ELEMENTS

MAGIC: Final = b"pT"
VERSION: Final = 2
LOSSLESS_FLAG: Final = 1
LOSSLESS_CHUNK_BYTES: Final = 1 << 20  # of the uncompressed payload; the last chunk may be shorter
CRC_BYTES: Final = 4
_START = struct.Struct("<2sBBBBBB")
_BODIES = [struct.Struct(f"<2sBBBBBB{dims + 1}Q") for dims in range(FRAME_DIMS + 1)]  # all but the checksum
_WHOLE = [struct.Struct(f"<2sBBBBBB{dims + 1}QI") for dims in range(FRAME_DIMS + 1)]
MAX_HEADER_BYTES: Final = _WHOLE[-1].size
_CHUNK_HEAD_BYTES = 4


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its code in the header, and its size in bytes."""

    code: int
    itemsize: int
    floating: bool = False


@dataclass(frozen=True, slots=True)
class Coding:
    """A payload's coding: its number in the header, the payload's size, and the dtypes that it applies to."""

    code: int
    payload_bytes: Callable[[DType, int, int], int]  # dtype, elements, block size
    floating_only: bool = True
    blockwise: bool = False


class ReadyBytes(Protocol):
    """Progress of a payload that is still being produced: the number of bytes that are final."""

    @property
    def ready_bytes(self) -> int: ...

    async def more(self, than_bytes: int) -> int:
        """Wait until more than `than_bytes` bytes are final; returns their number.

        Raises PeerdError if the rest will never be produced.
        """
        ...


DTYPES: Final[dict[str, DType]] = {
    "float64": DType(1, 8, floating=True),
    "float32": DType(2, 4, floating=True),
    "float16": DType(3, 2, floating=True),
    "bfloat16": DType(4, 2, floating=True),
    "int64": DType(5, 8),
    "int32": DType(6, 4),
    "int16": DType(7, 2),
    "int8": DType(8, 1),
    "uint8": DType(9, 1),
    "bool": DType(10, 1),
}


def _blockwise(code: str) -> Coding:
    def payload_bytes(_: DType, count: int, block: int) -> int:
        return SCALE_BYTES * scale_count(count, block) + CRC_BYTES + code_bytes(count, code) if count else 0

    return Coding(CODES[code].number, payload_bytes, blockwise=True)


# To add a coding, add a line with its length function; never reuse a number.
CODINGS: Final[dict[str, Coding]] = {
    "none": Coding(0, lambda dtype, count, _: dtype.itemsize * count, floating_only=False),
    "bf16": Coding(1, lambda _, count, __: 2 * count),
    "fp16": Coding(2, lambda _, count, __: 2 * count),
    **{code: _blockwise(code) for code in CODES},
}

_DTYPE_OF = {dtype.code: name for name, dtype in DTYPES.items()}
_CODING_OF = {coding.code: name for name, coding in CODINGS.items()}


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A validated frame header; `payload_bytes` is the length of the payload as sent."""

    dtype: str
    shape: tuple[int, ...]
    coding: str
    payload_bytes: int
    block: int = 0
    lossless: bool = False

    @property
    def raw_bytes(self) -> int:
        """Bytes of the payload before lossless compression."""
        return raw_bytes(self) if self.lossless else self.payload_bytes


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """A tensor as bytes: little-endian, C order. `dtype` is the type after decoding, for every coding.

    `payload` has its final size from the start; with `ready`, only a growing prefix of it is final.
    """

    dtype: str
    shape: tuple[int, ...]
    payload: bytes | bytearray | memoryview
    coding: str = "none"
    block: int = 0  # values that share a scale, in blockwise codings
    lossless: bool = False  # compressed on top of the coding
    ready: ReadyBytes | None = field(default=None, compare=False, repr=False)


@functools.lru_cache(maxsize=1024)  # most tensors of a run are alike
def expected_bytes(dtype: str, shape: tuple[int, ...], coding: str, block: int = 0) -> int:
    """Payload bytes of such a frame before lossless compression. Raises ValueError for a frame that is not allowed."""
    known_dtype, known_coding = DTYPES.get(dtype), CODINGS.get(coding)
    if known_dtype is None:
        raise ValueError(f"unknown dtype {dtype!r}")
    if known_coding is None:
        raise ValueError(f"unknown coding {coding!r}")
    if known_coding.floating_only and not known_dtype.floating:
        raise ValueError(f"coding {coding} is for floating point, not for {dtype}")
    if known_coding.blockwise and known_dtype.itemsize > 4:
        raise ValueError(f"coding {coding} is for floats of 2 or 4 bytes, not for {dtype}")
    if not (block in BLOCKS if known_coding.blockwise else block == 0):
        raise ValueError(f"a block of {block} values in coding {coding}")
    if len(shape) > FRAME_DIMS:
        raise ValueError(f"a tensor of {len(shape)} dims; allowed: {FRAME_DIMS}")
    count, extent = 1, 1
    for dim in shape:
        count *= dim
        extent *= max(dim, 1)  # a zero must not hide an absurd dim: other code may multiply in another order
        if dim < 0 or extent > FRAME_ELEMENTS:
            raise ValueError(f"a tensor of shape {shape}; allowed: {FRAME_ELEMENTS} elements")
    size = known_coding.payload_bytes(known_dtype, count, block)
    most = max(size, known_dtype.itemsize * count)  # a small coded payload must not decode to a huge tensor
    if most > FRAME_BYTES:
        raise ValueError(f"a payload or tensor of {most} bytes; allowed: {FRAME_BYTES}")
    return size


def lossless_bounds(raw_bytes: int) -> tuple[int, int]:
    """The smallest and largest size of a payload of `raw_bytes` after lossless compression.

    Each chunk has a length field and at least one byte; a chunk that does not shrink is stored uncompressed.
    """
    chunks = -(-raw_bytes // LOSSLESS_CHUNK_BYTES)
    return chunks * (_CHUNK_HEAD_BYTES + 1), raw_bytes + chunks * _CHUNK_HEAD_BYTES


def encode_header(frame: TensorFrame) -> bytes:
    """Encode the header of `frame`; LocalError if the payload does not fit the other fields."""
    size, dims = memoryview(frame.payload).nbytes, len(frame.shape)
    try:
        _check_size(frame, size)
    except ValueError as error:
        raise LocalError(f"cannot send this frame: {error}") from None
    flags = LOSSLESS_FLAG if frame.lossless else 0
    dtype, coding = DTYPES[frame.dtype].code, CODINGS[frame.coding].code
    log2 = frame.block.bit_length() - 1 if frame.block else 0
    body = _BODIES[dims].pack(MAGIC, VERSION, dtype, coding, flags, log2, dims, *frame.shape, size)
    return body + zlib.crc32(body).to_bytes(CRC_BYTES, "little")


def decode_header(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[FrameHeader, int]:
    """Decode the header at `offset`; returns it and the offset of its end. Raises ProtocolViolation."""
    if len(data) - offset < _START.size:
        raise ProtocolViolation("a frame header is cut short")
    magic, version, dtype_code, coding_code, flags, log2, dims = _START.unpack_from(data, offset)
    if magic != MAGIC:
        raise ProtocolViolation(f"a frame header that begins with {magic.hex()}")
    if version != VERSION:
        raise ProtocolViolation(f"frame version {version}; known: {VERSION}")
    if dims > FRAME_DIMS:
        raise ProtocolViolation(f"a tensor of {dims} dims; allowed: {FRAME_DIMS}")
    end = offset + _WHOLE[dims].size
    if len(data) < end:
        raise ProtocolViolation("a frame header is cut short")
    *_, size, checksum = fields = _WHOLE[dims].unpack_from(data, offset)
    if zlib.crc32(data[offset : end - CRC_BYTES]) != checksum:
        raise ProtocolViolation("a frame header whose checksum is wrong")
    if flags & ~LOSSLESS_FLAG:
        raise ProtocolViolation(f"a frame header with unknown flags {flags:#x}")
    dtype, coding = _DTYPE_OF.get(dtype_code, f"#{dtype_code}"), _CODING_OF.get(coding_code, f"#{coding_code}")
    block = 1 << log2 if log2 else 0
    header = FrameHeader(dtype, fields[7:-2], coding, size, block, bool(flags))
    try:
        _check_size(header, size)
    except ValueError as error:
        raise ProtocolViolation(str(error)) from None
    return header, end


def raw_bytes(frame: TensorFrame | FrameHeader) -> int:
    """Bytes of the frame's payload without lossless compression."""
    return expected_bytes(frame.dtype, frame.shape, frame.coding, frame.block)


def _check_size(frame: TensorFrame | FrameHeader, size: int) -> None:
    """Raise ValueError if such a frame cannot have a payload of `size` bytes."""
    raw = raw_bytes(frame)
    if not frame.lossless:
        if size != raw:
            raise ValueError(f"a {frame.dtype} frame of shape {frame.shape} has {raw} payload bytes, not {size}")
        return
    least, most = lossless_bounds(raw)
    if not least <= size <= most:
        text = f"a packed {frame.dtype} frame of shape {frame.shape}"
        raise ValueError(f"{text} has {least} to {most} payload bytes, not {size}")
