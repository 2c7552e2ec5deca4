"""TensorFrame: a tensor on the wire, as a small strict header and raw payload bytes. No torch, no arithmetic.

Header, big-endian: version 1, dtype code, coding code, number of dims (one byte each), then each dim (8 bytes), then
the payload's length (8 bytes). The payload follows elsewhere, little-endian, C order, raw. How many bytes it must
have follows from dtype, shape and coding alone, so the length is checked before anything is allocated.

A hostile peer may send: an unknown version, dtype or coding; more dims than allowed; dims whose product overflows
or is masked by a zero; a length that does not fit the shape. Each raises `ProtocolViolation`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.limits import FRAME_BYTES, FRAME_DIMS, FRAME_ELEMENTS

VERSION = 1
_START = struct.Struct(">BBBB")
_SIZES = [struct.Struct(f">{dims + 1}Q") for dims in range(FRAME_DIMS + 1)]  # the dims, then the payload's length
MAX_HEADER_BYTES = _START.size + _SIZES[-1].size


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: its code in the header, its size in bytes."""

    code: int
    itemsize: int
    floating: bool = False


@dataclass(frozen=True, slots=True)
class Coding:
    """How a payload was coded: its code in the header, and how many bytes it takes for so many elements."""

    code: int
    payload_bytes: Callable[[DType, int], int]
    floating_only: bool = True


DTYPES: dict[str, DType] = {
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

# A later coding adds a line here, with its own length function; codes are never used twice.
CODINGS: dict[str, Coding] = {
    "none": Coding(0, lambda dtype, count: dtype.itemsize * count, floating_only=False),
    "bf16": Coding(1, lambda dtype, count: 2 * count),
    "fp16": Coding(2, lambda dtype, count: 2 * count),
}

_DTYPE_OF = {dtype.code: name for name, dtype in DTYPES.items()}
_CODING_OF = {coding.code: name for name, coding in CODINGS.items()}


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """What a checked header says; `payload_bytes` bytes follow."""

    dtype: str
    shape: tuple[int, ...]
    coding: str
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class TensorFrame:
    """A tensor as bytes: little-endian, C order. `dtype` is what it is decoded to, whatever the coding."""

    dtype: str
    shape: tuple[int, ...]
    payload: bytes | bytearray | memoryview
    coding: str = "none"


def expected_bytes(dtype: str, shape: tuple[int, ...], coding: str) -> int:
    """Bytes that the payload of such a frame has; ValueError says what is not allowed."""
    known_dtype, known_coding = DTYPES.get(dtype), CODINGS.get(coding)
    if known_dtype is None:
        raise ValueError(f"unknown dtype {dtype!r}")
    if known_coding is None:
        raise ValueError(f"unknown coding {coding!r}")
    if known_coding.floating_only and not known_dtype.floating:
        raise ValueError(f"coding {coding} is for floating point, not for {dtype}")
    if len(shape) > FRAME_DIMS:
        raise ValueError(f"a tensor of {len(shape)} dims; allowed: {FRAME_DIMS}")
    count, extent = 1, 1
    for dim in shape:
        count *= dim
        extent *= max(dim, 1)  # so that a zero cannot hide an absurd dim from whoever multiplies in another order
        if dim < 0 or extent > FRAME_ELEMENTS:
            raise ValueError(f"a tensor of shape {shape}; allowed: {FRAME_ELEMENTS} elements")
    size = known_coding.payload_bytes(known_dtype, count)
    if size > FRAME_BYTES:
        raise ValueError(f"a payload of {size} bytes; allowed: {FRAME_BYTES}")
    return size


def encode_header(frame: TensorFrame) -> bytes:
    """The header of `frame`; LocalError when the frame is not what its own fields say."""
    try:
        size = expected_bytes(frame.dtype, frame.shape, frame.coding)
    except ValueError as error:
        raise LocalError(f"cannot send this frame: {error}") from None
    if memoryview(frame.payload).nbytes != size:
        given = memoryview(frame.payload).nbytes
        raise LocalError(f"a frame of shape {frame.shape} needs {size} payload bytes, not {given}")
    start = _START.pack(VERSION, DTYPES[frame.dtype].code, CODINGS[frame.coding].code, len(frame.shape))
    return start + _SIZES[len(frame.shape)].pack(*frame.shape, size)


def decode_header(data: bytes | bytearray | memoryview, offset: int = 0) -> tuple[FrameHeader, int]:
    """The header that starts at `offset`, and where it ends; ProtocolViolation on anything else."""
    if len(data) - offset < _START.size:
        raise ProtocolViolation("a frame header is cut short")
    version, dtype_code, coding_code, dims = _START.unpack_from(data, offset)
    offset += _START.size
    if version != VERSION:
        raise ProtocolViolation(f"frame version {version}; known: {VERSION}")
    if dims > FRAME_DIMS:
        raise ProtocolViolation(f"a tensor of {dims} dims; allowed: {FRAME_DIMS}")
    if len(data) - offset < _SIZES[dims].size:
        raise ProtocolViolation("a frame header is cut short")
    *shape, size = _SIZES[dims].unpack_from(data, offset)
    dtype, coding = _DTYPE_OF.get(dtype_code, f"#{dtype_code}"), _CODING_OF.get(coding_code, f"#{coding_code}")
    try:
        expected = expected_bytes(dtype, tuple(shape), coding)
    except ValueError as error:
        raise ProtocolViolation(str(error)) from None
    if size != expected:
        raise ProtocolViolation(f"a {dtype} frame of shape {tuple(shape)} has {expected} payload bytes, not {size}")
    return FrameHeader(dtype, tuple(shape), coding, size), offset + _SIZES[dims].size
