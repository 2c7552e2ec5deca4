"""A tensor that a peer sends: whatever its header and its payload say, a tensor of that shape, or ProtocolViolation."""

from __future__ import annotations

import math

import pytest

from peerd.core import frame
from peerd.core.frame import TensorFrame
from tests.fuzz.parsers import frame_headers
from tests.kit.frames import mended
from tests.kit.mutate import fuzz

PAYLOAD_BYTES_MAX = 1 << 12


def receive(data: bytes) -> None:
    """A header, then as much payload as it asks for, made of the same hostile bytes."""
    from peerd.compute.tensors import from_frame

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
    receive(frame_headers()[0] + bytes(24))
    fuzz(receive, frame_headers(), 100_000, seed=2)
