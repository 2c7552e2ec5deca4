"""The layout of coded payloads that the CPU and the GPU share: rounded dtypes, and scales with their checksum."""

from __future__ import annotations

import zlib
from typing import Final

import torch

from peerd.codec.format.frame import CRC_BYTES
from peerd.codec.kernels import ops, tables
from peerd.codec.tensors import values_of
from peerd.core.errors import PeerdError

ROUNDED: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
FP16_MAX: Final = 65504.0
_INFINITY_BITS: Final = 0x7F800000


class NotFinite(PeerdError):
    """A local tensor has values that its code cannot represent: NaN, infinity, or magnitudes beyond 3e38."""


def seal_scales(payload: memoryview, scale_bytes: int, name: str) -> None:
    """Write the checksum behind the scales; raises NotFinite if a scale marks its block as not encodable."""
    scales = values_of(payload[:scale_bytes], torch.float32)
    if not ops.all_coded(scales):
        bits = scales.view(torch.int32)
        first = int((bits > tables.LARGEST_BITS).nonzero()[0])
        what = "NaN or infinite values" if int(bits[first]) >= _INFINITY_BITS else "values beyond 3e38"
        raise NotFinite(f"{name} has {what}, first in block {first}")
    checksum = zlib.crc32(payload[:scale_bytes]).to_bytes(CRC_BYTES, "little")
    payload[scale_bytes : scale_bytes + CRC_BYTES] = checksum
