"""Blockwise quantization apart from its arithmetic: the codes, their sizes, and the layout of scales and codes.

A tensor's values in C order are cut into blocks of `block` values (the last may be shorter). Each block has a scale,
a single of 4 bytes, and a code of 8 or 4 bits for each value; with 4 bits, two neighbours share a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class BlockCode:
    """A code: its number on the wire and in the kernels, bits for a value, and the block size that suits it."""

    number: int
    bits: int
    block: int


CODES: Final[dict[str, BlockCode]] = {
    "dynamic8": BlockCode(16, 8, 256),
    "int8": BlockCode(17, 8, 64),
    "int4": BlockCode(18, 4, 64),
    "nf4": BlockCode(19, 4, 64),
    "fp8-e4m3": BlockCode(20, 8, 256),
}
BLOCKS: Final = tuple(1 << log2 for log2 in range(6, 13))  # 64 to 4096
SCALE_BYTES: Final = 4


def scale_count(count: int, block: int) -> int:
    """Scales of `count` values."""
    return -(-count // block)


def code_bytes(count: int, code: str) -> int:
    """Bytes that the codes of `count` values take, scales not included."""
    return -(-count * CODES[code].bits // 8)
