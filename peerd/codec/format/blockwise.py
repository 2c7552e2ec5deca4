"""Blockwise quantization, without the arithmetic: the codes, their sizes, and the layout of scales and codes.

A tensor's values in C order are cut into blocks of `block` values (the last block may be shorter). Each block has one
float32 scale and a code of 8 or 4 bits per value; two neighbouring 4-bit codes share a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class BlockCode:
    """A code: its number on the wire and in the kernels, the bits per value, and its default block size."""

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
    """Number of scales for `count` values."""
    return -(-count // block)


def code_bytes(count: int, code: str) -> int:
    """Bytes of the codes of `count` values, without scales."""
    return -(-count * CODES[code].bits // 8)
