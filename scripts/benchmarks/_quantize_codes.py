"""Errors of codes, and ratios and rates of lossless packing: the numbers in `peerd/codec/policy.py`.

Measured on payloads as they are sent, with one CPU thread.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from peerd.codec import lossless
from peerd.codec.format.blockwise import CODES
from peerd.codec.frames import decode, encode
from peerd.codec.policy import CodingPlan, PackingSpeed
from peerd.codec.tensors import dtype_name
from scripts.benchmarks._quantize_cpu import Figures, Way, median_seconds, values

BLOCK, OUTLIER = 64, 100.0  # one value of each BLOCK is OUTLIER times as large
ERRORS = (
    *(CodingPlan("bf16"), CodingPlan("fp16"), CodingPlan("dynamic8", 64)),
    *(CodingPlan(code, how.block) for code, how in CODES.items()),
)
PACKING_FIGURES = (  # key, words, unit, digits
    ("ratio", "what is left of a byte", "", 2),
    ("pack_gb_s", "pack", "GB/s", 2),
    ("unpack_gb_s", "unpack", "GB/s", 2),
    ("pays_below_mb_s", "pays on lines below", "Mb/s", 0),
)
TEXT = Path(__file__).resolve().parents[1] / "README.md"


def errors(count: int) -> Figures:
    """Relative errors (RMS) in percent, of normal values without and with one outlier per BLOCK.

    With outliers, only their neighbours count, since an outlier's own relative error is small.
    """
    x = values(count)
    spiky = x.clone()
    spiky[::BLOCK] *= OUTLIER
    neighbour = torch.arange(count) % BLOCK != 0
    return {
        str(plan): {
            "normal": error_percent(x, decoded(x, plan)),
            "beside_outliers": error_percent(spiky[neighbour], decoded(spiky, plan)[neighbour]),
        }
        for plan in ERRORS
    }


def decoded(x: Tensor, plan: CodingPlan) -> Tensor:
    return decode(encode(x, plan))


def error_percent(x: Tensor, found: Tensor) -> float:
    return float(100 * (found.double() - x.double()).norm() / x.double().norm())


def packing(count: int, rounds: int) -> Figures:
    """Compression ratio of payloads, GB/s of packing and unpacking, and the line (Mb/s) below which packing pays off.

    The payloads are normal values in each dtype and code, and a text as bytes and as int64 tokens.
    """
    wide = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = wide.float()
    text = torch.tensor(list(TEXT.read_bytes()), dtype=torch.uint8)
    exact = (wide, x, x.bfloat16(), x.half())
    payloads = {dtype_name(each.dtype): (encode(each, CodingPlan()).payload, each.itemsize) for each in exact}
    payloads |= {code: (encode(x, CodingPlan(code)).payload, 1) for code in CODES}
    plain = CodingPlan()
    payloads |= {"text": (encode(text, plain).payload, 1), "tokens": (encode(text.long(), plain).payload, 8)}
    return {name: packed(memoryview(raw), itemsize, rounds) for name, (raw, itemsize) in payloads.items()}


def packed(raw: memoryview, itemsize: int, rounds: int) -> dict[str, float]:
    """Figures of one payload."""
    small = lossless.pack(raw, itemsize)
    ways: dict[str, Way] = {
        "pack": partial(lossless.pack, raw, itemsize),
        "unpack": partial(lossless.unpack, small, raw.nbytes, itemsize, name="a payload"),
    }
    seconds = median_seconds(ways, rounds)
    found = PackingSpeed(small.nbytes / raw.nbytes, raw.nbytes / seconds["pack"], raw.nbytes / seconds["unpack"])
    return {
        "ratio": found.ratio,
        "pack_gb_s": found.pack_bytes_per_s / 1e9,
        "unpack_gb_s": found.unpack_bytes_per_s / 1e9,
        "pays_below_mb_s": found.pays_below_bytes_per_s * 8 / 1e6,
    }
