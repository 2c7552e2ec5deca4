"""Blockwise quantization on a CPU and a GPU: rates relative to copies, other libraries, and the overhead of a call.

Rates are GB/s of the input (float32 if not stated otherwise), into buffers that were used before. On the CPU, all runs
on one thread: with an input larger than the caches, for which the targets hold, and with a smaller one. `copy` is
torch's copy of the same input. Other libraries and plain torch get the smaller input. The errors of codes and the gains
of lossless packing are measured too; `peerd/codec/policy.py` uses these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from peerd.codec.format.blockwise import CODES
from peerd.codec.kernels import native
from scripts.benchmarks import _quantize_codes as codes
from scripts.benchmarks import _quantize_cpu as cpu
from scripts.benchmarks import _quantize_cuda as cuda
from scripts.benchmarks._report import Figure, Report

TARGETS = {
    ("dynamic8", "quantize"): 0.45,
    ("int8", "quantize"): 0.80,
    ("dynamic8", "dequantize"): 0.90,
    ("int8", "dequantize"): 0.90,
}
GPU_TARGET = 0.70
CALL_US = 10.0
WORDS = {"normal": "normally distributed", "beside_outliers": "beside outliers"}
DIRECTIONS = ("quantize", "dequantize")
OTHERS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "bitsandbytes": cpu.bitsandbytes_rates,
    "torchao": cpu.torchao_rates,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the measurement. Counts are of values."""

    rounds: int
    large: int
    small: int
    small_repeats: int  # calls per round
    slow_rounds: int  # for plain torch and other libraries, with the small input
    call_batches: int
    coded: int  # for the errors of codes and the gains of packing
    gpu: int
    gpu_rounds: int
    gpu_repeats: int


QUICK = Sizes(40, 16 << 20, 1 << 20, 8, 7, 40, 4 << 20, 128 << 20, 10, 10)
FULL = Sizes(80, 16 << 20, 1 << 20, 16, 15, 200, 16 << 20, 256 << 20, 30, 20)


def other_libraries(sizes: Sizes) -> dict[str, Any]:
    """Figures by library. A missing library has None, and under `NAME_missing` how to install it."""
    found: dict[str, Any] = {}
    for name, rates in OTHERS.items():
        try:
            found[name] = rates(sizes.small, sizes.slow_rounds)
        except (
            ImportError,
            AttributeError,
            TypeError,
            RuntimeError,
            OSError,
        ) as error:  # missing, or an incompatible version
            found[name] = None
            why = str(error).partition("\n")[0]
            found[f"{name}_missing"] = f"{why}; to compare: pip install --no-deps {name}"
    return found


def code_figures(
    prefix: str, text: str, found: dict[str, Any], target: Callable[[str, str], float | None]
) -> list[Figure]:
    """Two rows for each code and direction: the rate, and its share of the bound or of the copy's rate."""
    share = "bound" if "quantize_over_bound" in found["int8"] else "memcpy"
    words = {"bound": "what the copy's bandwidth allows", "memcpy": "copy"}[share]
    figures = []
    for code, how in CODES.items():
        for direction in DIRECTIONS:
            name, key = f"{text}{code}/{how.block} {direction}", f"{prefix}{code}_{direction}"
            figures += [
                Figure(f"{key}_gb_s", name, found[code][f"{direction}_gb_s"], "GB/s"),
                Figure(
                    f"{key}_over_{share}",
                    f"{name} / {words}",
                    found[code][f"{direction}_over_{share}"],
                    at_least=target(code, direction),
                ),
            ]
    return figures


def cpu_sections(sizes: Sizes) -> tuple[list[list[Figure]], dict[str, Any]]:
    rounds = sizes.rounds if native.available() else sizes.slow_rounds
    copy_gb_s, large = cpu.rates(sizes.large, rounds, 1)
    small_copy_gb_s, small = cpu.rates(sizes.small, rounds, sizes.small_repeats)
    plain = cpu.reference_rates(sizes.small, sizes.slow_rounds)
    large_mb, small_mb = (count * 4 / 2**20 for count in (sizes.large, sizes.small))
    sections = [
        [
            Figure("memcpy_gb_s", f"copy of {large_mb:g} MiB", copy_gb_s, "GB/s"),
            *code_figures("", "", large, lambda *way: TARGETS.get(way)),
        ],
        [
            Figure("small_memcpy_gb_s", f"copy of {small_mb:g} MiB", small_copy_gb_s, "GB/s"),
            *code_figures("small_", f"{small_mb:g} MiB: ", small, lambda *_: None),
        ],
        [
            Figure(
                f"torch_{code}_{direction}_gb_s", f"plain torch: {code} {direction}", rates[f"{direction}_gb_s"], "GB/s"
            )
            for code, rates in plain.items()
            for direction in DIRECTIONS
        ],
    ]
    inputs = {"cpu": large_mb, "cpu_small": small_mb, "torch_reference": small_mb}
    return sections, {"cpu": large, "cpu_small": small, "torch_reference": plain, "input_mib": inputs}


def older_processors(sizes: Sizes) -> tuple[list[Figure], dict[str, Any]]:
    """Rates of the large input with the other instruction sets of this processor."""
    if not native.available():
        return [], {}
    best, found, figures = native.isa(), {}, []
    try:
        for isa in native.isas():
            if isa == best:
                continue
            native.use_isa(isa)
            _, found[isa] = cpu.rates(sizes.large, -(-sizes.rounds // 4), 1)
            for code, direction in TARGETS:
                share = found[isa][code][f"{direction}_over_memcpy"]
                name = f"{isa}: {code}/{CODES[code].block} {direction} / copy"
                figures.append(Figure(f"{isa}_{code}_{direction}_over_memcpy", name, share))
    finally:
        native.use_isa(best)
    return figures, {"cpu_isas": found}


def call_section(sizes: Sizes) -> tuple[list[Figure], dict[str, Any]]:
    calls = cpu.call_us(sizes.call_batches)
    figures = [
        Figure(
            f"call_us_{name.replace(',', '').replace(' ', '_')}",
            f"a call: {name}",
            took,
            "us",
            at_most=CALL_US if name in DIRECTIONS else None,
        )
        for name, took in calls.items()
    ]
    return figures, {"call_us": calls}


def other_section(found: dict[str, Any]) -> list[Figure]:
    return [
        Figure(f"{name}_{code}_{direction}_gb_s", f"{name} {rates['version']}: {code} {direction}", value, "GB/s", 3)
        for name, rates in found.items()
        if isinstance(rates, dict)
        for code in CODES
        if code in rates
        for direction in DIRECTIONS
        for value in [rates[code][f"{direction}_gb_s"]]
    ]


def gpu_section(found: dict[str, Any] | None) -> list[Figure]:
    if found is None:
        return []
    figures = [
        Figure(f"cuda_call_us_{name}", f"a call for the GPU: {name}", took, "us")
        for name, took in found["call_us"].items()
    ]
    figures += [
        Figure(f"cuda_beside_{code}", f"a product while {code} codes / alone", its["both_ms"] / its["compute_ms"])
        for code, its in found["beside_computing"].items()
    ]
    for prefix, dtype, part in (("cuda_", "float32", found), ("cuda_bf16_", "bfloat16", found["bf16"])):
        figures.append(
            Figure(f"{prefix}copy_gb_s", f"{dtype} on the GPU: copy, read and written", part["copy_gb_s"], "GB/s", 0)
        )
        figures += code_figures(prefix, f"{dtype} on the GPU: ", part, lambda *_: GPU_TARGET)
    return figures


def error_section(found: cpu.Figures) -> list[Figure]:
    return [
        Figure(f"error_percent_{name}_{kind}", f"relative error of {name}: values {WORDS[kind]}", error, "%")
        for name, errors in found.items()
        for kind, error in errors.items()
    ]


def packing_section(found: cpu.Figures) -> list[Figure]:
    return [
        Figure(f"packing_{name}_{key}", f"packing of {name}: {words}", figures[key], unit, digits)
        for name, figures in found.items()
        for key, words, unit, digits in codes.PACKING_FIGURES
    ]


def measure(full: bool) -> Report:
    sizes = FULL if full else QUICK
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sections, extra = cpu_sections(sizes)
        older, older_extra = older_processors(sizes)
        calls, call_extra = call_section(sizes)
        others = other_libraries(sizes)
        errors = codes.errors(sizes.coded)
        packed = codes.packing(sizes.coded, sizes.slow_rounds)
        gpu = cuda.measured(sizes.gpu, sizes.gpu_rounds, sizes.gpu_repeats)
    finally:
        torch.set_num_threads(before)
    sections += [older, calls, other_section(others), error_section(errors), packing_section(packed), gpu_section(gpu)]
    how = f"C++ kernels, {native.isa()}" if native.available() else f"plain torch: {native.why_not()}"
    where = "no GPU" if gpu is None else f"{gpu['device']}, {gpu['implementation']}"
    missing = "; ".join(words for name, words in others.items() if name.endswith("_missing"))
    timing = f"medians of {sizes.rounds} alternating rounds, on CPUs of processor time"
    note = f"one thread; CPU: {how}; {where}; {timing}; {missing}".rstrip("; ")
    found = {**extra, **older_extra, **call_extra, **others, "error_percent": errors, "packing": packed, "cuda": gpu}
    found["cpu_implementation"] = how
    return Report("quantize", [section for section in sections if section], note, found)
