"""Tensor frames: headers come back as they were; what does not add up is a violation."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.codec.format import blockwise
from peerd.codec.format.frame import (
    CODINGS,
    DTYPES,
    LOSSLESS_CHUNK_BYTES,
    MAX_HEADER_BYTES,
    FrameHeader,
    TensorFrame,
    decode_header,
    encode_header,
    expected_bytes,
    lossless_bounds,
)
from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.limits import FRAME_BYTES
from tests.kit.frames import mended, raw_header

GOLDEN = Path(__file__).parents[2] / "golden" / "frame_v2.bin"
GOLDEN_FRAMES = [
    TensorFrame("float32", (2, 3), bytes(24)),
    TensorFrame("float64", (4,), bytes(8), "bf16"),
    TensorFrame("int64", (), bytes(8)),
    TensorFrame("uint8", (0, 7), b""),
    TensorFrame("float32", (3, 100), bytes(8 + 4 + 300), "dynamic8", 256),
    TensorFrame("bfloat16", (65,), bytes(8 + 4 + 33), "nf4", 64),
    TensorFrame("float16", (4097,), bytes(8 + 4 + 4097), "fp8-e4m3", 4096),
    TensorFrame("float32", (1,), bytes(4 + 4 + 1), "int8", 64),
    TensorFrame("float32", (0,), b"", "int4", 128),
    TensorFrame("float32", (1000,), bytes(77), lossless=True),
    TensorFrame("float32", (1000,), bytes(500), "int4", 64, lossless=True),
]


def header_of(frame: TensorFrame) -> FrameHeader:
    header, end = decode_header(encode_header(frame))
    assert end == len(encode_header(frame)) <= MAX_HEADER_BYTES
    return header


def allowed(dtype: str, coding: str, block: int) -> bool:
    if coding in blockwise.CODES:
        return dtype in ("float32", "float16", "bfloat16") and block in blockwise.BLOCKS
    return block == 0 and (coding == "none" or DTYPES[dtype].floating)


@given(
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from(sorted(CODINGS)),
    st.lists(st.integers(0, 5), max_size=8).map(tuple),
    st.sampled_from([0, *blockwise.BLOCKS]),
    st.booleans(),
)
def test_a_header_comes_back_as_it_was(
    dtype: str, coding: str, shape: tuple[int, ...], block: int, lossless: bool
) -> None:
    if not allowed(dtype, coding, block):
        with pytest.raises(ValueError):
            expected_bytes(dtype, shape, coding, block)
        return
    size = expected_bytes(dtype, shape, coding, block)
    if coding not in blockwise.CODES:
        assert size == (DTYPES[dtype].itemsize if coding == "none" else 2) * math.prod(shape)
    if lossless:
        size = lossless_bounds(size)[size % 2]
    frame = TensorFrame(dtype, shape, bytes(size), coding, block, lossless)
    header = header_of(frame)
    assert header == FrameHeader(dtype, shape, coding, size, block, lossless)
    assert header.raw_bytes == expected_bytes(dtype, shape, coding, block)


@pytest.mark.parametrize(
    ("coding", "block", "count", "size"),
    [
        ("dynamic8", 256, 1, 4 + 4 + 1),
        ("dynamic8", 256, 256, 4 + 4 + 256),
        ("dynamic8", 256, 257, 8 + 4 + 257),
        ("int4", 64, 65, 8 + 4 + 33),
        ("nf4", 4096, 4096, 4 + 4 + 2048),
        ("fp8-e4m3", 64, 0, 0),
    ],
)
def test_a_blockwise_payload_is_scales_their_checksum_and_codes(coding: str, block: int, count: int, size: int) -> None:
    assert expected_bytes("float32", (count,), coding, block) == size


@given(st.integers(0, FRAME_BYTES), st.integers())
def test_packed_payloads_stay_within_their_bounds(raw_bytes: int, seed: int) -> None:
    rng = random.Random(seed)
    chunks = [min(LOSSLESS_CHUNK_BYTES, raw_bytes - at) for at in range(0, raw_bytes, LOSSLESS_CHUNK_BYTES)]
    least, most = lossless_bounds(raw_bytes)
    assert least <= sum(4 + rng.randint(1, chunk) for chunk in chunks) <= most
    assert sum(4 + 1 for _ in chunks) == least
    assert sum(4 + chunk for chunk in chunks) == most


def test_the_header_has_the_bytes_that_were_agreed() -> None:
    assert b"".join(encode_header(frame) for frame in GOLDEN_FRAMES) == GOLDEN.read_bytes()


def test_a_header_is_what_its_fields_say() -> None:
    frame = TensorFrame("bfloat16", (2, 300), bytes(40), "nf4", 128, lossless=True)
    assert encode_header(frame) == raw_header(4, 19, (2, 300), 40, flags=1, block_log2=7)
    assert mended(encode_header(frame)) == encode_header(frame)


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
        TensorFrame("float32", (2,), bytes(8), block=64),
        TensorFrame("float32", (2,), bytes(4), "bf16", 64),
        TensorFrame("float32", (2,), bytes(10), "int8"),
        TensorFrame("float32", (2,), bytes(10), "int8", 32),
        TensorFrame("float32", (2,), bytes(10), "int8", 96),
        TensorFrame("float32", (2,), bytes(9), "int8", 64),
        TensorFrame("float64", (2,), bytes(10), "int8", 64),
        TensorFrame("int32", (2,), bytes(10), "int8", 64),
        TensorFrame("float32", (2,), bytes(4), lossless=True),
        TensorFrame("float32", (2,), bytes(13), lossless=True),
        TensorFrame("float32", (0,), bytes(5), lossless=True),
    ],
)
def test_a_frame_that_contradicts_itself_is_not_sent(frame: TensorFrame) -> None:
    with pytest.raises(LocalError):
        encode_header(frame)


@pytest.mark.parametrize(
    "data",
    [
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
        raw_header(9, 0, (2**30,), 5 << 10, flags=1),  # packed, and too large once unpacked
        raw_header(2, 0, (2, 3), 24, block_log2=6),
        raw_header(2, 16, (2,), 10),
        *(raw_header(2, 16, (2,), 10, block_log2=log2) for log2 in (1, 5, 13, 64, 255)),
        raw_header(2, 16, (2,), 6, block_log2=6),  # without the checksum of the scales
        raw_header(1, 16, (2,), 10, block_log2=6),  # blockwise coding of float64
        raw_header(9, 17, (2,), 10, block_log2=6),
        raw_header(2, 0, (2, 3), 24, flags=2),
        raw_header(2, 0, (2, 3), 24, flags=0x81),
        raw_header(2, 0, (2, 3), 4, flags=1),
        raw_header(2, 0, (2, 3), 29, flags=1),
        raw_header(2, 0, (0, 3), 5, flags=1),
    ],
)
def test_impossible_headers_are_violations(data: bytes) -> None:
    with pytest.raises(ProtocolViolation, match=r"payload|dtype|coding|dims|shape|block|flags"):
        decode_header(data)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (raw_header(2, 0, (2, 3), 24, magic=b"Tp"), "begins with 5470"),
        (b"\x01\x02\x00\x01" + bytes(16), "begins with 0102"),  # the first version had no magic
        (raw_header(2, 0, (2, 3), 24, version=1), "version 1; known: 2"),
        (raw_header(2, 0, (2, 3), 24, version=3), "version 3; known: 2"),
    ],
)
def test_another_kind_of_header_is_refused_as_such(data: bytes, fault: str) -> None:
    with pytest.raises(ProtocolViolation, match=fault):
        decode_header(data)


def test_any_flipped_bit_of_a_header_is_noticed() -> None:
    data = encode_header(TensorFrame("float32", (3, 100), bytes(312), "dynamic8", 256))
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolViolation):
            decode_header(damaged)


def test_a_header_cut_anywhere_is_a_violation() -> None:
    data = encode_header(TensorFrame("float32", (2, 3), bytes(24)))
    for end in range(len(data)):
        with pytest.raises(ProtocolViolation, match="cut short"):
            decode_header(data[:end])
