"""Tensor frames: headers come back as they were; what does not add up is a violation."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.frame import (
    CODINGS,
    DTYPES,
    MAX_HEADER_BYTES,
    FrameHeader,
    TensorFrame,
    decode_header,
    encode_header,
    expected_bytes,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "frame_v1.bin"


def header_of(frame: TensorFrame) -> FrameHeader:
    header, end = decode_header(encode_header(frame))
    assert end == len(encode_header(frame)) <= MAX_HEADER_BYTES
    return header


def raw_header(dtype: int, coding: int, shape: tuple[int, ...], size: int, version: int = 1) -> bytes:
    return struct.pack(f">BBBB{len(shape)}QQ", version, dtype, coding, len(shape), *shape, size)


@given(
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from(sorted(CODINGS)),
    st.lists(st.integers(0, 5), max_size=8).map(tuple),
)
def test_a_header_comes_back_as_it_was(dtype: str, coding: str, shape: tuple[int, ...]) -> None:
    if CODINGS[coding].floating_only and not DTYPES[dtype].floating:
        with pytest.raises(ValueError):
            expected_bytes(dtype, shape, coding)
        return
    itemsize = DTYPES[dtype].itemsize if coding == "none" else 2
    frame = TensorFrame(dtype, shape, bytes(itemsize * math.prod(shape)), coding)
    assert header_of(frame) == FrameHeader(dtype, shape, coding, len(frame.payload))


def test_the_header_has_the_bytes_that_were_agreed() -> None:
    frames = [
        TensorFrame("float32", (2, 3), bytes(24)),
        TensorFrame("float64", (4,), bytes(8), "bf16"),
        TensorFrame("int64", (), bytes(8)),
        TensorFrame("uint8", (0, 7), b""),
    ]
    assert b"".join(encode_header(frame) for frame in frames) == GOLDEN.read_bytes()


def test_headers_follow_each_other() -> None:
    data = encode_header(TensorFrame("int8", (3,), b"abc")) + encode_header(TensorFrame("bool", (), b"\x01"))
    first, at = decode_header(data)
    second, end = decode_header(data, at)
    assert (first.shape, second.shape, end) == ((3,), (), len(data))


def test_a_payload_may_be_a_view_of_wider_items() -> None:
    view = memoryview(bytearray(16)).cast("f")
    assert header_of(TensorFrame("float32", (4,), view)).payload_bytes == 16


@pytest.mark.parametrize(
    "frame",
    [
        TensorFrame("float32", (2,), bytes(7)),
        TensorFrame("float31", (2,), bytes(8)),
        TensorFrame("float32", (2,), bytes(8), "zip"),
        TensorFrame("int32", (2,), bytes(4), "fp16"),
        TensorFrame("float32", (1,) * 9, bytes(4)),
        TensorFrame("float32", (-1, -1), bytes(4)),
    ],
)
def test_a_frame_that_contradicts_itself_is_not_sent(frame: TensorFrame) -> None:
    with pytest.raises(LocalError):
        encode_header(frame)


@pytest.mark.parametrize(
    "data",
    [
        raw_header(2, 0, (2, 3), 24, version=2),
        raw_header(2, 0, (2, 3), 23),
        raw_header(2, 0, (2, 3), 25),
        raw_header(99, 0, (2, 3), 24),
        raw_header(0, 0, (2, 3), 24),
        raw_header(2, 99, (2, 3), 24),
        raw_header(6, 1, (2, 3), 12),  # bf16 coding of int32
        raw_header(2, 0, (1,) * 9, 4),
        raw_header(2, 0, (2**32, 2**32), 0),  # the product is 2^64, which is 0 in 64 bits
        raw_header(2, 0, (2**63, 2), 0),
        raw_header(2, 0, (0, 2**63), 0),  # hidden behind a zero
        raw_header(9, 0, (2**30,), 2**30),  # honest, and too large
    ],
)
def test_impossible_headers_are_violations(data: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode_header(data)


def test_a_header_cut_anywhere_is_a_violation() -> None:
    data = encode_header(TensorFrame("float32", (2, 3), bytes(24)))
    for end in range(len(data)):
        with pytest.raises(ProtocolViolation, match="cut short"):
            decode_header(data[:end])


@given(st.binary(max_size=90))
def test_random_bytes_raise_only_violations(data: bytes) -> None:
    try:
        header, end = decode_header(data)
    except ProtocolViolation:
        return
    assert header.payload_bytes == expected_bytes(header.dtype, header.shape, header.coding)
    assert end <= len(data)
