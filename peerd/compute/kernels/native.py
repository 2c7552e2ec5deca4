"""Loads the compiled library of blockwise quantization for CPUs, and calls it for tensors. blockwise.cpp is its source.

The library is built beside this file when peerd is installed, and is optional: without it `available()` is False,
`why_not()` says in a sentence what to do, and the torch reference serves, slower. It links to nothing of Python or
torch, and is told addresses and lengths only; every length is checked here before a call. Calls let other threads run.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from peerd.core.blockwise import BLOCKS, CODES

ISAS: Final = ("plain", "avx2", "avx512", "avx512-vbmi", "neon")  # by the library's numbers

_ABI: Final = 1
_FOLDER = Path(__file__).parent
_MEND: Final = "CPU tensors are coded by plain torch, many times slower; reinstall peerd with a C++ compiler to mend it"
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_KINDS: Final = {name: (code.number, 8 // code.bits) for name, code in CODES.items()}  # and codes in a byte
_LOG2: Final = {block: block.bit_length() - 1 for block in BLOCKS}
_POINTER, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class _Library:
    """The functions of a loaded library, with their types. OSError or AttributeError when it is not ours."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.abi = library.peerd_abi
        self.isa = library.peerd_isa
        self.use_isa = library.peerd_use_isa
        self.quantize = library.peerd_quantize
        self.dequantize = library.peerd_dequantize
        self.scales = library.peerd_scales
        self.use_isa.argtypes = (_INT,)
        self.quantize.argtypes = (_POINTER, _INT, _INT64, _INT, _INT, _POINTER, _POINTER)
        self.dequantize.argtypes = (_POINTER, _POINTER, _INT64, _INT, _INT, _POINTER, _INT)
        self.scales.argtypes = (_POINTER, _INT, _INT64, _INT, _POINTER)


def available() -> bool:
    """Whether the library was built and loads on this machine."""
    return isinstance(_load(), _Library)


def why_not() -> str:
    """Empty when available; otherwise one sentence: what is the matter, what it costs, how to mend it."""
    found = _load()
    return found if isinstance(found, str) else ""


def isa() -> str:
    """The instruction set in use, one of ISAS."""
    return ISAS[_library().isa()]


def use_isa(name: str) -> None:
    """For tests and measurements: use another instruction set. ValueError when this machine lacks it."""
    if name not in ISAS or _library().use_isa(ISAS.index(name)):
        raise ValueError(f"this build or processor has no {name}")


def isas() -> list[str]:
    """The instruction sets that this build and processor have; none without a library."""
    library = _load()
    if isinstance(library, str):
        return []
    in_use = library.isa()
    found = [name for number, name in enumerate(ISAS) if library.use_isa(number) == 0]
    library.use_isa(in_use)
    return found


def quantize(
    x: Tensor, code: str, block: int, codes: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes (uint8, flat) and scales (float32, one a block) of `x` (float32, bfloat16 or float16 on a CPU; any shape).

    Written into `codes` and `scales` when given: contiguous, of exactly that size. ValueError otherwise.
    """
    call, dtype, (number, a_byte), log2 = _library().quantize, _dtype(x), _kind(code), _block_log2(block)
    x = _contiguous(x)
    count = x.numel()
    size, blocks = -(-count // a_byte), -(-count >> log2)
    if codes is None:
        codes = torch.empty(size, dtype=torch.uint8)
    else:
        _check_place("codes", codes, torch.uint8, size)
    if scales is None:
        scales = torch.empty(blocks, dtype=torch.float32)
    else:
        _check_place("scales", scales, torch.float32, blocks)
    _check(call(x.data_ptr(), dtype, count, number, log2, scales.data_ptr(), codes.data_ptr()))
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, code: str, block: int, out: Tensor) -> Tensor:
    """Decode into `out`, contiguous, whose shape and dtype say what was coded; returns it.

    Any codes and scales are decoded. ValueError when a tensor has the wrong dtype, size or place.
    """
    call, dtype, (number, a_byte), log2 = _library().dequantize, _dtype(out), _kind(code), _block_log2(block)
    if not out.is_contiguous():
        raise ValueError("out has to be contiguous")
    codes, scales, count = _contiguous(codes), _contiguous(scales), out.numel()
    _check_place("codes", codes, torch.uint8, -(-count // a_byte))
    _check_place("scales", scales, torch.float32, -(-count >> log2))
    _check(call(codes.data_ptr(), scales.data_ptr(), count, number, log2, out.data_ptr(), dtype))
    return out


def block_scales(x: Tensor, block: int) -> Tensor:
    """The scales alone: enough to see whether `x` can be coded."""
    call, dtype, log2 = _library().scales, _dtype(x), _block_log2(block)
    x = _contiguous(x)
    scales = torch.empty(-(-x.numel() >> log2), dtype=torch.float32)
    _check(call(x.data_ptr(), dtype, x.numel(), log2, scales.data_ptr()))
    return scales


def _library() -> _Library:
    found = _load()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@cache
def _load() -> _Library | str:
    """The library, or the sentence why there is none."""
    path = next((path for path in _candidates(_FOLDER) if path.exists()), None)
    if path is None:
        return f"the compiled kernels of blockwise quantization were not built: {_MEND}"
    try:
        library = _Library(path)
    except (OSError, AttributeError) as error:
        return f"the compiled kernels of blockwise quantization cannot be loaded ({error}): {_MEND}"
    if library.abi() != _ABI:
        return f"the compiled kernels of blockwise quantization are of another version of peerd ({path}): {_MEND}"
    return library


def _candidates(folder: Path) -> list[Path]:
    """Where builds for this interpreter leave the library, the most exact name first."""
    return [folder / f"_blockwise{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]


def _contiguous(values: Tensor) -> Tensor:
    return values if values.is_contiguous() else values.detach().contiguous()


def _dtype(values: Tensor) -> int:
    if not values.is_cpu:
        raise ValueError(f"the tensor has to be on a CPU, not on {values.device}")
    number = _DTYPES.get(values.dtype)
    if number is None:
        raise ValueError(f"values have to be float32, bfloat16 or float16, not {values.dtype}")
    return number


def _kind(code: str) -> tuple[int, int]:
    kind = _KINDS.get(code)
    if kind is None:
        raise ValueError(f"there is no code {code!r}; there are {', '.join(_KINDS)}")
    return kind


def _block_log2(block: int) -> int:
    log2 = _LOG2.get(block)
    if log2 is None:
        raise ValueError(f"a block has {BLOCKS[0]} to {BLOCKS[-1]} values, a power of two, not {block}")
    return log2


def _check_place(name: str, given: Tensor, dtype: torch.dtype, size: int) -> None:
    """Addresses are all that the library is told: nothing else keeps it inside of a tensor."""
    if given.dtype != dtype or given.numel() != size or not given.is_cpu:
        raise ValueError(f"{name} has to hold {size} {dtype} on a CPU, not {given.numel()} {given.dtype}")
    if not given.is_contiguous():
        raise ValueError(f"{name} has to be contiguous")


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"the compiled kernels refused a call ({status})")
