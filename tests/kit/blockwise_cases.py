"""Inputs for blockwise quantization that tell implementations apart, and how two results are compared.

`hard_cases` is a fixed list for any device; `bit_lists` draws values as bits, of every kind that a block can hold.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from peerd.codec.format.blockwise import CODES, code_bytes, scale_count
from peerd.codec.kernels import tables

NAMES = tuple(CODES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIGN = 0x80000000
INFINITY, NAN, ONE = 0x7F800000, 0x7FC00000, 0x3F800000
# Lengths around the edges of blocks, of pairs of 4-bit codes and of the widest vectors.
LENGTHS = (0, 1, 2, 3, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 4095, 4096, 4097, 10_007)


def to_bits(value: float) -> int:
    """Bits of the nearest single."""
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def from_bits(bits: Sequence[int]) -> Tensor:
    """A float32 tensor of exactly these bits."""
    return torch.tensor([value - (value >> 31 << 32) for value in bits], dtype=torch.int32).view(torch.float32)


def bits_of(values: Tensor) -> list[int]:
    """Bits of the values as singles, which holds those of float16 and bfloat16 exactly."""
    return [value & 0xFFFFFFFF for value in values.reshape(-1).float().view(torch.int32).tolist()]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """True when two tensors are equal to the bit: -0.0 is not 0.0, a NaN is itself."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[left.element_size()]
    return torch.equal(left.contiguous().view(whole), right.contiguous().view(whole))


def normal(count: int, seed: int, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed values."""
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def near_thresholds(scale: float = 1.0) -> Tensor:
    """Blocks whose largest value is `scale`, filled with values next to where some code changes, of both signs."""
    magnitudes = list(tables.DYNAMIC_THRESHOLDS) + [bits & ~SIGN for bits in tables.NF4_THRESHOLDS]
    magnitudes += [to_bits((q + 0.5) / 127) for q in range(127)] + [to_bits((q + 0.5) / 7) for q in range(7)]
    magnitudes += [to_bits(e4m3_middle(code) / 448) for code in range(0x7E)]
    around = [bits + step for bits in magnitudes for step in (-2, -1, 0, 1, 2)]
    values = from_bits([bits | sign for bits in around for sign in (0, SIGN)]) * scale
    filled = torch.nn.functional.pad(values, (0, -len(values) % 63)).view(-1, 63)
    return torch.cat((torch.full((len(filled), 1), scale), filled), dim=1).reshape(-1)


def e4m3_middle(code: int) -> float:
    """Half way between the eight-bit float of this code and the next."""
    pair = torch.tensor([code, code + 1], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    return float(pair[:1].mean() if code == 0x7E else pair.mean())


def hard_cases(seed: int) -> dict[str, Tensor]:
    """Name -> float32 tensor. Together they reach every rule of the definition."""
    extremes = [INFINITY, INFINITY | SIGN, NAN, NAN | SIGN, NAN | 0x1234, 0x7F800001, 0x7F7FFFFF]
    edges = [tables.LARGEST_BITS, tables.LARGEST_BITS + 1, tables.SMALLEST_BITS, tables.SMALLEST_BITS + 1]
    base = normal(1000, seed)
    cases = {f"{count} normal values": normal(count, seed + count) for count in LENGTHS}
    for spread in (1e-40, 1e-38, 3e-37, 1e-5, 5e37):
        cases[f"normal values times {spread:g}"] = normal(700, seed, spread)
    for scale in (1.0, 0.7, 2.9e38, 1.3e-37, 3e3):
        cases[f"next to thresholds times {scale:g}"] = near_thresholds(scale)
    for bits in extremes + edges:
        for at in (0, 63, 64, 999):
            values = base.clone()
            values[at] = from_bits([bits])[0]
            cases[f"{bits:#010x} at {at}"] = values
        cases[f"only {bits:#010x}"] = from_bits([bits] * 100)
    for bits in edges:
        small = from_bits([bits | SIGN, bits, SIGN, 0, bits >> 1, 1, SIGN | 1] * 30)
        cases[f"largest magnitude {bits:#010x}"] = torch.where(small.abs() > from_bits([bits])[0], 0.0, small)
    cases["zeros of both signs"] = from_bits([0, SIGN] * 100)
    cases["one value a block, the rest -0.0"] = from_bits(([ONE | SIGN] + [SIGN] * 255) * 3)
    cases["every exponent"] = from_bits([exponent << 23 | SIGN * (exponent & 1) | 0x2AAAAA for exponent in range(254)])
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-(1 << 31), (1 << 31) - 1, (20_000,), dtype=torch.int32, generator=generator)
    cases["random bits"] = whole.view(torch.float32)
    return cases


def hard_codes(code: str, count: int, block: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes of every byte, and scales of every kind that the wire allows: zero, tiny, usual and largest."""
    generator = torch.Generator().manual_seed(seed)
    size, scales = code_bytes(count, code), scale_count(count, block)
    codes = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    codes[: min(256, size)] = torch.arange(min(256, size), dtype=torch.uint8)
    if code in ("int4", "nf4") and count % 2:
        codes[-1] &= 15
    kinds = from_bits([ONE, 0, tables.SMALLEST_BITS + 1, tables.LARGEST_BITS, to_bits(65504.0), to_bits(1e-6)])
    return codes, kinds[torch.arange(scales) % len(kinds)]


def bit_lists(most: int = 200) -> st.SearchStrategy[list[int]]:
    """Values as bits of singles, in blocks of one magnitude, with what breaks rules strewn in."""
    anything = st.integers(0, 0xFFFFFFFF)
    special = st.sampled_from(
        [
            *(0, SIGN, 1, SIGN | 1, INFINITY, INFINITY | SIGN, NAN, 0x7F7FFFFF, ONE, ONE | SIGN),
            *(tables.LARGEST_BITS, tables.LARGEST_BITS + 1, tables.SMALLEST_BITS, tables.SMALLEST_BITS + 1),
        ]
    )
    usual = st.floats(-4.0, 4.0, width=32).map(to_bits)
    step = st.integers(-127, 127).map(lambda q: to_bits((q + 0.5) / 127))
    threshold = st.sampled_from(tables.DYNAMIC_THRESHOLDS + tables.NF4_THRESHOLDS)
    near = st.tuples(threshold, st.integers(-1, 1), st.sampled_from([0, SIGN])).map(lambda t: (t[0] + t[1]) ^ t[2])
    plain = st.lists(st.one_of(usual, step, near), max_size=most)
    led_by_one = plain.map(lambda values: [ONE, *values])
    mixed = st.lists(st.one_of(usual, special), max_size=most)
    return st.one_of(plain, led_by_one, mixed, st.lists(anything, max_size=most))
