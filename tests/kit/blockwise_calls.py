"""Runs the quantization library outside of this process: built for another processor, or with a compiler's checks.

`build` makes a program of blockwise.cpp and blockwise_calls.cpp; `carry_out` has it make calls and brings the outputs.
"""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from peerd.codec.format.blockwise import CODES, code_bytes, scale_count
from peerd.codec.kernels import native

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [ROOT / "tests/kit/blockwise_calls.cpp", ROOT / "peerd/codec/kernels/source/blockwise.cpp"]
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-fast-math"]
FUNCTIONS = ("quantize", "dequantize", "scales", "quantize_missing", "dequantize_onto")
INPUTS, OUTPUTS = 3, 4
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class Call:
    """A call of one function.

    `inputs` are the values, and what was missed before if that counts; or the codes, their scales, and what they are
    decoded onto.
    """

    function: str
    isa: str
    code: str
    block: int
    dtype: torch.dtype
    count: int
    inputs: tuple[Tensor, ...]

    def outputs(self) -> tuple[Tensor, ...]:
        """Empty tensors as the function fills them."""
        scales = torch.empty(scale_count(self.count, self.block))
        values, codes = torch.empty(self.count, dtype=self.dtype), code_bytes(self.count, self.code)
        if self.function in ("dequantize", "dequantize_onto"):
            return (values,)
        if self.function == "scales":
            return (scales,)
        further = (values, values.clone()) if self.function == "quantize_missing" else ()
        return torch.empty(codes, dtype=torch.uint8), scales, *further


def build(compiler: str, options: Sequence[str], folder: Path) -> Path:
    """The program, of this compiler. Raises subprocess.CalledProcessError with what the compiler said."""
    program = folder / "calls"
    subprocess.run([compiler, *FLAGS, *options, *SOURCES, "-o", program], check=True, capture_output=True, text=True)
    return program


def carry_out(command: Sequence[str | Path], calls: Sequence[Call], folder: Path) -> list[tuple[Tensor, ...]]:
    """Output of the calls. AssertionError when one was refused or the program failed."""
    request, reply = folder / "request", folder / "reply"
    with request.open("wb") as file:
        for call in calls:
            file.write(_packed(call))
    ended = subprocess.run([*command, request, reply], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, f"the program ended with {ended.returncode}: {ended.stderr}"
    found, answers = reply.read_bytes(), []
    for call in calls:
        (status,) = struct.unpack_from("<q", found)
        assert status == native.ISAS.index(call.isa), f"{call.function} with {call.isa}: status {status}"
        found, outputs = found[8:], []
        for empty in call.outputs():
            raw, found = found[: empty.nbytes], found[empty.nbytes :]
            outputs.append(torch.frombuffer(bytearray(raw), dtype=empty.dtype) if raw else empty)
        answers.append(tuple(outputs))
    assert not found
    return answers


def _packed(call: Call) -> bytes:
    inputs = [_bytes(values) for values in call.inputs]
    sizes = [len(raw) for raw in inputs] + [0] * (INPUTS - len(inputs))
    sizes += [empty.nbytes for empty in call.outputs()] + [0] * (OUTPUTS - len(call.outputs()))
    numbers = (FUNCTIONS.index(call.function), native.ISAS.index(call.isa), DTYPES[call.dtype])
    code = (CODES[call.code].number, call.block.bit_length() - 1, call.count)
    return struct.pack(f"<{6 + INPUTS + OUTPUTS}q", *numbers, *code, *sizes) + b"".join(inputs)


def _bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes() if values.numel() else b""
