"""Choice of a tensor's coding, with the reason: a pure function of run file, link rate and sampled values. No torch.

Stateless: every frame declares its coding, so the choice may change from one frame to the next at no cost.

Packing (zstandard) pays if the transfer time that it saves exceeds the time that it takes at both ends. With a packed
size of r per byte, and c and d bytes packed and unpacked per second,

    (1 - r) / link rate > 1 / c + 1 / d
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from peerd.codec.format.blockwise import CODES
from peerd.codec.format.frame import CODINGS, DTYPES
from peerd.run.runfile import BoundarySection


@dataclass(frozen=True, slots=True)
class CodingPlan:
    """How one tensor is encoded."""

    coding: str = "none"  # one of codec.format.frame.CODINGS
    block: int = 0  # values that share a scale; 0: the code's default, or no blocks
    lossless: bool = False  # also packed by zstandard

    def __str__(self) -> str:
        text = f"{self.coding}/{self.block}" if self.block else self.coding
        return f"{text} + zstd" if self.lossless else text


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """Summary of a tensor's values.

    `crest`: mean square of the blocks' largest magnitudes, divided by the mean square of all values, in blocks of 64; 0
    if all values are zero.
    """

    crest: float

    @property
    def int8_error(self) -> float:
        """Relative error (RMS) of int8: steps of 1/127 of a block's largest value, errors uniform within a step."""
        return math.sqrt(self.crest) / (127 * math.sqrt(12))


@dataclass(frozen=True, slots=True)
class PackingSpeed:
    """Compression ratio of packing (packed size / raw size), and the raw bytes that one core packs and unpacks per
    second.
    """

    ratio: float
    pack_bytes_per_s: float
    unpack_bytes_per_s: float

    @property
    def pays_below_bytes_per_s(self) -> float:
        """Link rate above which packing takes longer than the transfer time that it saves."""
        return (1 - self.ratio) / (1 / self.pack_bytes_per_s + 1 / self.unpack_bytes_per_s)


# Chosen, not measured: links slower than this get a code, since a swarm seldom waits for faster ones.
EXACT_FROM_BYTES_PER_S: Final = 1e9
BF16_FROM_BYTES_PER_S: Final = 250e6
# Measured by `python scripts/bench.py quantize` ("relative error of dynamic8/64"), for normally distributed
# values. With heavy tails it is 0.011 (tests/codec/kernels/test_blockwise.py): outliers have steps of their own.
DYNAMIC8_ERROR: Final = 0.0094
BLOCK: Final = 64  # the most accurate size, for a sixteenth of a byte more per value

# Measured by the same command ("packing of ..."), on normally distributed values, including sorting into planes.
PACKED: Final = {
    "float64": PackingSpeed(0.88, 0.97e9, 1.7e9),
    "float32": PackingSpeed(0.84, 0.75e9, 1.87e9),
    "bfloat16": PackingSpeed(0.68, 0.48e9, 1.35e9),
    "float16": PackingSpeed(0.85, 1.3e9, 1.73e9),
    "dynamic8": PackingSpeed(0.91, 0.88e9, 1.23e9),
    "int8": PackingSpeed(0.95, 0.88e9, 1.23e9),
    "int4": PackingSpeed(0.88, 0.92e9, 1.3e9),
    "nf4": PackingSpeed(0.96, 0.9e9, 1.3e9),
    "fp8-e4m3": PackingSpeed(0.82, 0.92e9, 1.21e9),
}
PACKED_NUMBERS: Final = PackingSpeed(0.44, 0.42e9, 0.9e9)  # bytes of a text; as int64 tokens they shrink to 0.06
_ROUNDED: Final = {"bf16": "bfloat16", "fp16": "float16"}
PACKED_BYTES_LEAST: Final = 16 << 10  # chosen: for smaller payloads the saved time does not matter


def choose(
    boundary: BoundarySection,
    rate_bytes_per_s: float | None,
    sample: TensorSummary | None,
    dtype: str,
    values: int | None = None,
) -> tuple[CodingPlan, str]:
    """Choose the plan for a tensor of `dtype`; returns it and the reason in words.

    `rate_bytes_per_s`: measured rate of the link, None or 0 if unknown. `sample`: used by `auto` only, which does not
    choose int8 without one. `values`: number of values in the tensor, None for many.
    """
    rate = rate_bytes_per_s or None
    if not DTYPES[dtype].floating:
        coding, why = "none", f"{dtype} is sent uncoded"
    elif boundary.code != "auto":
        coding, why = boundary.code, "set by the run file"
    else:
        coding, why = _by_line(rate, sample, dtype)
    block = (boundary.block or (BLOCK if boundary.code == "auto" else CODES[coding].block)) if coding in CODES else 0
    size = None if values is None else CODINGS[coding].payload_bytes(DTYPES[dtype], values, block)
    lossless, because = _packed(boundary, rate, coding, dtype, size)
    return CodingPlan(coding, block, lossless), f"{why}; {because}"


def _by_line(rate: float | None, sample: TensorSummary | None, dtype: str) -> tuple[str, str]:
    line = f"a link of {rate / 1e6:.3g} MB/s" if rate is not None else "a link of unknown speed"
    if rate is not None and rate >= EXACT_FROM_BYTES_PER_S:
        return "none", f"uncoded on {line}"
    if DTYPES[dtype].itemsize > 4:
        return "bf16", f"bf16 on {line}, because {dtype} has no code of 8 bits"
    if rate is not None and rate >= BF16_FROM_BYTES_PER_S:
        coding = "bf16" if DTYPES[dtype].itemsize > 2 else "none"
        return coding, f"2 bytes per value on {line}"
    if sample is None:
        return "dynamic8", f"8 bits per value on {line}; dynamic8 because the values were not sampled"
    error = f"int8 would have an error of {100 * sample.int8_error:.2f} %"
    if sample.int8_error <= DYNAMIC8_ERROR:
        return "int8", f"8 bits per value on {line}; {error}, dynamic8 of {100 * DYNAMIC8_ERROR:.2f} %"
    return "dynamic8", f"8 bits per value on {line}; outliers: {error}, dynamic8 of {100 * DYNAMIC8_ERROR:.2f} %"


def packing_of(coding: str, dtype: str) -> PackingSpeed:
    """Measured ratio and speed of packing for payloads of this coding and dtype."""
    if coding == "none":
        return PACKED[dtype] if DTYPES[dtype].floating else PACKED_NUMBERS
    return PACKED[_ROUNDED.get(coding, coding)]


def _packed(
    boundary: BoundarySection, rate: float | None, coding: str, dtype: str, size: int | None
) -> tuple[bool, str]:
    if boundary.lossless != "auto":
        return boundary.lossless == "always", f"{boundary.lossless} packed, set by the run file"
    if size is not None and size < PACKED_BYTES_LEAST:
        return False, f"not packed because it is small ({size} bytes)"
    if rate is None:
        return False, "not packed because the link's speed is unknown"
    limit = packing_of(coding, dtype).pays_below_bytes_per_s
    if rate < limit:
        return True, f"packed, which pays below {limit / 1e6:.3g} MB/s"
    return False, f"not packed, which pays only below {limit / 1e6:.3g} MB/s"
