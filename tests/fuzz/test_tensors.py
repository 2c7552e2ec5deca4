"""A tensor that a peer sends: whatever its header and its payload say, a tensor of that shape, or ProtocolViolation."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from functools import cache

import pytest

from peerd.codec.format import frame
from peerd.codec.format.blockwise import CODES, SCALE_BYTES, scale_count
from peerd.codec.format.frame import TensorFrame
from tests.fuzz.parsers import frame_headers
from tests.kit.amount import mutations, thorough
from tests.kit.frames import mended
from tests.kit.mutate import accepts, fuzz

PAYLOAD_BYTES_MAX = 1 << 12
RAW_BYTES_MAX = 1 << 22


def receive(data: bytes) -> None:
    """A header, then as much payload as it asks for, made of the same hostile bytes."""
    from peerd.codec.frames import from_frame

    data = mended(data)
    header, end = frame.decode_header(data)
    if header.payload_bytes > PAYLOAD_BYTES_MAX:
        return
    payload = bytearray((data[end:] + data) * (1 + header.payload_bytes // len(data)))[: header.payload_bytes]
    sent = TensorFrame(header.dtype, header.shape, payload, header.coding, header.block, header.lossless)
    taken = from_frame(sent, finite=len(data) % 2 == 0)
    assert tuple(taken.shape) == header.shape
    assert taken.numel() == math.prod(header.shape)


@pytest.mark.slow
def test_tensors_survive_many_mutated_frames() -> None:
    assert accepts(receive, frame_headers()[0] + bytes(24))
    assert fuzz(receive, frame_headers(), mutations(100_000), seed=2) == ""


@cache
def coded_frames() -> Sequence[bytes]:
    """Headers with the payloads that belong to them, in every coding, packed and not."""
    import torch

    from peerd.codec.frames import encode
    from peerd.codec.policy import CodingPlan

    tensor = torch.randn(5, 60, generator=torch.Generator().manual_seed(1))
    made = [
        encode(tensor.to(dtype), CodingPlan(coding, lossless=lossless))
        for coding in frame.CODINGS
        for dtype in (torch.float32, torch.float16)
        for lossless in (False, True)
    ]
    return [frame.encode_header(one) + bytes(one.payload) for one in made]


def receive_whole(data: bytes) -> None:
    """A frame with its own payload, of whatever length that has now; every second time its scales are vouched for."""
    from peerd.codec.frames import decode

    data = mended(data)
    header, end = frame.decode_header(data)
    if header.raw_bytes > RAW_BYTES_MAX:
        return
    payload = bytearray(data[end:])
    if header.coding in CODES and not header.lossless and len(data) % 2:
        scales = SCALE_BYTES * scale_count(math.prod(header.shape), header.block)
        payload[scales : scales + 4] = zlib.crc32(payload[:scales]).to_bytes(4, "little")
    sent = TensorFrame(header.dtype, header.shape, payload, header.coding, header.block, header.lossless)
    taken = decode(sent)
    assert tuple(taken.shape) == header.shape
    if header.coding in CODES:
        assert taken.isfinite().all()


@pytest.mark.parametrize("count", [pytest.param(5_000, marks=pytest.mark.slow), thorough(100_000)])
def test_tensors_survive_mutated_frames_of_every_coding(count: int) -> None:
    assert all(accepts(receive_whole, data) for data in coded_frames())
    assert fuzz(receive_whole, coded_frames(), count, seed=4) == ""
