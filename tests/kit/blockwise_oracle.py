"""Blockwise quantization worked out one value at a time with fractions: what every implementation is held to.

Written from the definition, not from the reference: it uses no tensors, no thresholds and no floating point. A number
is its exact fraction, rounded where single precision rounds; the nearest value of a table is looked for among all of
them, a tie goes to the upper one. Slow: for hundreds of values, not for thousands.
"""

from __future__ import annotations

import bisect
import functools
import struct
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from peerd.codec.kernels import tables

SIGN: Final = 0x80000000
FORMATS: Final = {"float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14)}  # precision, smallest exponent
STEPS: Final = {"int8": 127, "int4": 7, "fp8-e4m3": 448}
ZERO: Final = {"dynamic8": 0, "int8": 0, "int4": 8, "nf4": 7, "fp8-e4m3": 0}


def exact(bits: int) -> Fraction:
    """The finite single that these bits are."""
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def rounded(value: Fraction, precision: int = 24, smallest_exponent: int = -126) -> Fraction:
    """The nearest number with so many significant bits, ties to even; below the smallest exponent steps stay equal."""
    if value == 0:
        return value
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, smallest_exponent) - precision + 1)
    return round(value / step) * step


def single_bits(value: Fraction, negative: bool) -> int:
    """Bits of a single; the sign is told apart, for zero has one."""
    return int(struct.unpack("<I", struct.pack("<f", abs(value)))[0]) | (SIGN if negative else 0)


DYNAMIC: Final = [exact(bits) for bits in tables.DYNAMIC]
NF4: Final = [exact(bits) for bits in tables.NF4]


def nearest(value: Fraction, table: Sequence[Fraction]) -> int:
    """Index of the nearest entry of an ascending table; the later one when two are equally near."""
    above = min(max(bisect.bisect_left(table, value), 1), len(table) - 1)
    return above if table[above] - value <= value - table[above - 1] else above - 1


def scale_of(block: Sequence[int]) -> int:
    """Bits of a block's scale."""
    largest = max(bits & ~SIGN for bits in block)
    return 0 if largest <= tables.SMALLEST_BITS else largest


@functools.lru_cache(1 << 16)
def encoded(bits: int, scale_bits: int, code: str) -> int:
    """The code of one value."""
    if scale_bits == 0 or scale_bits > tables.LARGEST_BITS:
        return ZERO[code]
    n = rounded(exact(bits) * rounded(1 / exact(scale_bits)))
    sign = 0x80 if bits & SIGN else 0
    match code:
        case "dynamic8":
            return nearest(abs(n), DYNAMIC) | sign
        case "int8":
            return round(rounded(n * 127)) & 0xFF
        case "int4":
            return round(rounded(n * 7)) + 8
        case "nf4":
            return nearest(n, NF4)
    return E4M3_CODES[rounded(rounded(abs(n) * 448), 4, -6)] | sign


def e4m3_value(code: int) -> Fraction:
    """Magnitude of an eight-bit float with four exponent bits; its NaN counts as its largest number."""
    exponent, fraction = min(code & 0x7F, 0x7E) >> 3, min(code & 0x7F, 0x7E) & 7
    if exponent == 0:
        return Fraction(fraction, 8) / 64
    return (1 + Fraction(fraction, 8)) * Fraction(2) ** (exponent - 7)


E4M3_CODES: Final = {e4m3_value(code): code for code in range(0x7F)}


def decoded(code_byte: int, scale_bits: int, code: str) -> tuple[Fraction, bool]:
    """The value of a code as a single and whether it is negative (zero can be), for a scale that blocks can have."""
    scale = exact(scale_bits)
    if code == "dynamic8":
        value, negative = DYNAMIC[code_byte & 0x7F], code_byte >= 0x80
    elif code == "nf4":
        value, negative = abs(NF4[code_byte]), NF4[code_byte] < 0
    elif code == "fp8-e4m3":
        value, negative = e4m3_value(code_byte), code_byte >= 0x80
    else:
        signed = code_byte - 8 if code == "int4" else code_byte - 256 * (code_byte >= 0x80)
        value, negative = min(Fraction(abs(signed)), Fraction(STEPS[code])), signed < 0
    if code in STEPS:
        scale = rounded(scale * rounded(Fraction(1, STEPS[code])))
    magnitude = rounded(value * scale)
    return (-magnitude if negative else magnitude), negative


def quantized(values: Sequence[int], code: str, block: int) -> tuple[bytes, list[int]]:
    """Packed codes and the scales' bits of values given as bits of singles."""
    blocks = [values[at : at + block] for at in range(0, len(values), block)]
    scales = [scale_of(part) for part in blocks]
    codes = [encoded(bits, scale, code) for part, scale in zip(blocks, scales, strict=True) for bits in part]
    if code in ("int4", "nf4"):
        codes.append(0)
        codes = [codes[at] | codes[at + 1] << 4 for at in range(0, len(values), 2)]
    return bytes(codes), scales


def dequantized(
    codes: Sequence[int], scales: Sequence[int], code: str, block: int, count: int, dtype: str
) -> list[int]:
    """Bits of the decoded values, as singles that are exactly what `dtype` holds; infinity where that overflows."""
    if code in ("int4", "nf4"):
        codes = [nibble for byte in codes for nibble in (byte & 15, byte >> 4)][:count]
    return [decoded_bits(byte, scales[index // block], code, dtype) for index, byte in enumerate(codes)]


@functools.lru_cache(1 << 16)
def decoded_bits(code_byte: int, scale_bits: int, code: str, dtype: str) -> int:
    """Bits of one decoded value, as `dequantized` gives them."""
    largest = {"float32": 0x7F7FFFFF, "bfloat16": 0x7F7F0000, "float16": tables.FLOAT16_LARGEST_BITS}[dtype]
    value, negative = decoded(code_byte, scale_bits, code)
    stored = rounded(value, *FORMATS[dtype])
    infinite = abs(stored) > exact(largest)
    return (0x7F800000 | SIGN * negative) if infinite else single_bits(stored, negative)
