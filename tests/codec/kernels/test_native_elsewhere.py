"""The C++ kernels on a processor that is not this one, and under a compiler's checks.

For aarch64 they are built by a cross compiler and run in an emulator; for this processor, with checks for undefined
behaviour and for memory that is not theirs. Both answer as the torch reference does, to the bit.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peerd.codec.kernels import native, reference
from tests.kit.blockwise_calls import Call, build, carry_out
from tests.kit.blockwise_cases import DTYPES, NAMES, from_bits, hard_cases, hard_codes, normal, same_bits

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
CHECKS = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
ANY_SCALES = from_bits([0, 1, 0x80000000, 0x007FFFFF, 0x02081CEA, 0x3F800000, 0x7F61B1E6, 0x7F7FFFFF, 0xBF800000])

pytestmark = pytest.mark.slow


def calls_of(isa: str, seed: int) -> Iterator[Call]:
    """Each function with each code and dtype, on all kinds of values and on lengths that leave any rest."""
    cases = [values for name, values in hard_cases(seed).items() if "at" not in name]
    cases += [normal(count, seed + count) for count in range(1, 140, 3)]
    for number, values in enumerate(cases):
        block, count = (64, 256, 4096)[number % 3], values.numel()
        for code in NAMES:
            before = (normal(count, seed),) if number % 2 else ()
            yield Call("quantize_missing", isa, code, block, torch.float32, count, (values, *before))
            onto = (*hard_codes(code, count, block, seed), normal(count, seed))
            yield Call("dequantize_onto", isa, code, block, torch.float32, count, onto)
    for dtype in DTYPES:
        for number, values in enumerate(cases):
            x, block = values.to(dtype), (64, 256, 4096)[number % 3]
            yield Call("scales", isa, "int8", block, dtype, x.numel(), (x,))
            for code in NAMES:
                yield Call("quantize", isa, code, block, dtype, x.numel(), (x,))
        for code in NAMES:
            for count in (1, 2, 63, 64, 65, 129, 4097):
                codes, scales = hard_codes(code, count, 64, seed)
                yield Call("dequantize", isa, code, 64, dtype, count, (codes, scales))
            codes, _ = hard_codes(code, 64 * len(ANY_SCALES), 64, seed)
            yield Call("dequantize", isa, code, 64, dtype, 64 * len(ANY_SCALES), (codes, ANY_SCALES))


def expected(call: Call) -> tuple[torch.Tensor, ...]:
    if call.function == "quantize":
        return reference.quantize(call.inputs[0], call.code, call.block)
    if call.function == "scales":
        return (reference.block_scales(call.inputs[0], call.block),)
    if call.function == "quantize_missing":
        x, *before = call.inputs
        codes, scales, missed, seen = call.outputs()
        missed = before[0].clone() if before else missed
        reference.quantize_missing(
            x, call.code, call.block, codes, scales, reference.CodingOutputs(missed, bool(before), seen)
        )
        return codes, scales, missed, seen
    if call.function == "dequantize_onto":
        codes, scales, base = call.inputs
        (out,) = call.outputs()
        reference.dequantize_onto(codes, scales, call.code, call.block, base, out)
        return (out,)
    codes, scales = call.inputs
    return (reference.dequantize(codes, scales, call.code, call.block, call.outputs()[0]),)


def check(command: list[str | Path], isas: list[str], folder: Path, seed: int) -> None:
    for isa in isas:
        calls = list(calls_of(isa, seed))
        for call, found in zip(calls, carry_out(command, calls, folder), strict=True):
            for one, other in zip(found, expected(call), strict=True):
                nan = one.isnan() & other.isnan()  # which NaN comes of a NaN is the processor's choice
                zero = torch.zeros((), dtype=one.dtype)
                same = same_bits(torch.where(nan, zero, one), torch.where(nan, zero, other))
                assert same, f"{isa}: {call.function} {call.code}/{call.block} of {call.count} {call.dtype}"


@pytest.mark.thorough
def test_arm_processors_code_and_decode_to_the_same_bits(tmp_path: Path, seed: int) -> None:
    missing = [name for name in (CROSS, EMULATOR) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not found (Debian has them in g++-aarch64-linux-gnu and qemu-user)")
    program = build(CROSS, ["-O3", "-static"], tmp_path)
    check([EMULATOR, program], ["neon", "plain"], tmp_path, seed)


@pytest.mark.thorough
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_no_instruction_set_leaves_its_buffers_or_relies_on_undefined_behaviour(
    compiler: str, tmp_path: Path, seed: int
) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} not found")
    try:
        program = build(compiler, CHECKS, tmp_path)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{compiler} cannot build with checks here: {error.stderr.splitlines()[-1]}")
    check([program], native.isas() or ["plain"], tmp_path, seed)
