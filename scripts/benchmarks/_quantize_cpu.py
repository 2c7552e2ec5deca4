"""Blockwise quantization on one CPU thread, compared with copies, plain torch and other libraries.

The candidates take turns in many short rounds, and the median round of each counts. Times are processor times of this
process, which equal the elapsed times on an idle machine and hardly change on a busy one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from peerd.codec.format.blockwise import CODES, code_bytes, scale_count
from peerd.codec.kernels import native, ops, reference

Way = Callable[[], object]
Figures = dict[str, dict[str, float]]  # code -> name of a figure -> value
CALLS_PER_BATCH = 200


@dataclass(frozen=True, slots=True)
class Coded:
    """A tensor with buffers for its codes and scales, and for the decoded values."""

    x: Tensor
    code: str
    block: int
    codes: Tensor
    scales: Tensor
    out: Tensor

    @property
    def name(self) -> str:
        return f"{self.code}/{self.block}"

    def ways(self, kernels: ops.Kernels) -> dict[str, Way]:
        """Functions that quantize and dequantize with these kernels, into the buffers."""
        x, code, block, codes, scales = self.x, self.code, self.block, self.codes, self.scales
        return {
            f"{code} quantize": partial(kernels.quantize, x, code, block, codes, scales),
            f"{code} dequantize": partial(kernels.dequantize, codes, scales, code, block, self.out),
        }


def values(count: int) -> Tensor:
    """Normally distributed values, the same in every run."""
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


def all_codes(x: Tensor, out: Tensor) -> list[Coded]:
    """Buffers for each code of x, with the code's default block size."""
    rooms = []
    for code, how in CODES.items():
        codes = torch.zeros(code_bytes(x.numel(), code), dtype=torch.uint8, device=x.device)
        scales = torch.zeros(scale_count(x.numel(), how.block), device=x.device)
        rooms.append(Coded(x, code, how.block, codes, scales, out))
    return rooms


def median_seconds(ways: Mapping[str, Way], rounds: int, repeats: int = 1) -> dict[str, float]:
    """Median processor time of one call of each candidate. They take turns; the first round is a warm-up."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begin = time.process_time()
            for _ in range(repeats):
                way()
            if number:
                took[name].append((time.process_time() - begin) / repeats)
    return {name: statistics.median(times) for name, times in took.items()}


def rates(count: int, rounds: int, repeats: int) -> tuple[float, Figures]:
    """GB/s of a plain copy of `count` float32 values, and of each code with its ratio to the copy."""
    x, out = values(count), torch.zeros(count)
    kernels = ops.best(x.device)
    ways: dict[str, Way] = {"copy": partial(out.copy_, x)}
    for room in all_codes(x, out):
        ways |= room.ways(kernels)
    gb_s = {name: x.nbytes / 1e9 / seconds for name, seconds in median_seconds(ways, rounds, repeats).items()}
    return gb_s["copy"], {code: over_copy(gb_s, code, gb_s["copy"]) for code in CODES}


def over_copy(gb_s: Mapping[str, float], code: str, copy_gb_s: float) -> dict[str, float]:
    """GB/s of both directions of a code, absolute and relative to the copy."""
    quantize, dequantize = gb_s[f"{code} quantize"], gb_s[f"{code} dequantize"]
    return {
        "quantize_gb_s": quantize,
        "dequantize_gb_s": dequantize,
        "quantize_over_memcpy": quantize / copy_gb_s,
        "dequantize_over_memcpy": dequantize / copy_gb_s,
    }


def reference_rates(count: int, rounds: int) -> Figures:
    """GB/s of plain torch, which is used if no compiled kernels are available."""
    x, out = values(count), torch.zeros(count)
    ways: dict[str, Way] = {}
    for room in all_codes(x, out):
        ways |= room.ways(reference)
    seconds = median_seconds(ways, rounds)
    return directions({name: x.nbytes / 1e9 / second for name, second in seconds.items()}, list(CODES))


def directions(gb_s: Mapping[str, float], names: list[str]) -> Figures:
    return {
        name: {"quantize_gb_s": gb_s[f"{name} quantize"], "dequantize_gb_s": gb_s[f"{name} dequantize"]}
        for name in names
    }


def call_us(batches: int) -> dict[str, float]:
    """Overhead of one call in microseconds: with 64 values, into existing buffers unless the name says otherwise."""
    x = values(64)
    codes, scales, out = torch.zeros(64, dtype=torch.uint8), torch.zeros(1), torch.zeros(64)
    quantize, dequantize = torch.ops.peerd.quantize_blockwise, torch.ops.peerd.dequantize_blockwise
    ways: dict[str, Way] = {
        "quantize operator": partial(quantize.out, x, "int8", 64, codes=codes, scales=scales),
        "dequantize operator": partial(dequantize.out, codes, scales, "int8", 64, out=out),
        "quantize operator, new tensors": partial(quantize.default, x, "int8", 64),
        "copy of 64 values by torch": partial(out.copy_, x),
    }
    if native.available():
        ways["quantize"] = partial(native.quantize, x, "int8", 64, codes, scales)
        ways["dequantize"] = partial(native.dequantize, codes, scales, "int8", 64, out)
    return {name: 1e6 * seconds for name, seconds in median_seconds(ways, batches, CALLS_PER_BATCH).items()}


# --- other libraries -------------------------------------------------------------------------------------------------
def bitsandbytes_rates(count: int, rounds: int) -> dict[str, Any]:
    """GB/s of bitsandbytes on the CPU: its dynamic 8-bit code with blocks of 256, and nf4 with blocks of 64.

    The results are new tensors, since on CPUs it cannot write into existing ones.
    """
    import bitsandbytes
    from bitsandbytes import functional

    x = values(count)
    codes, state = functional.quantize_blockwise(x, blocksize=256)
    codes_4, state_4 = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
    ways: dict[str, Way] = {
        "dynamic8 quantize": partial(functional.quantize_blockwise, x, blocksize=256),
        "dynamic8 dequantize": partial(functional.dequantize_blockwise, codes, state),
        "nf4 quantize": partial(functional.quantize_4bit, x, blocksize=64, quant_type="nf4"),
        "nf4 dequantize": partial(functional.dequantize_4bit, codes_4, state_4),
    }
    gb_s = {name: x.nbytes / 1e9 / second for name, second in median_seconds(ways, rounds).items()}
    return {"version": bitsandbytes.__version__, **directions(gb_s, ["dynamic8", "nf4"])}


def torchao_rates(count: int, rounds: int) -> dict[str, Any]:
    """GB/s of torchao on the CPU: its dynamic 8-bit code with blocks of 256, not compiled."""
    import torchao
    from torchao.optim import quant_utils

    x = values(count)
    table = torch.tensor(quant_utils.create_dynamic_map(signed=True))

    def encoded() -> tuple[Tensor, Tensor]:
        scaled, scales = quant_utils.scale_tensor(x, 256)
        return quant_utils.quantize_8bit_with_qmap(scaled, table), scales

    codes, scales = encoded()
    ways: dict[str, Way] = {
        "dynamic8 quantize": encoded,
        "dynamic8 dequantize": partial(quant_utils.dequant_with_qmap, codes, table, scales),
    }
    gb_s = {name: x.nbytes / 1e9 / second for name, second in median_seconds(ways, rounds).items()}
    return {"version": torchao.__version__, **directions(gb_s, ["dynamic8"])}
