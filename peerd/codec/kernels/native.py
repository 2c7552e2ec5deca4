"""Loads the compiled CPU library of blockwise quantization (source: blockwise.cpp), and calls it for tensors.

The library is built beside this file when peerd is installed, and is optional. Without it `available()` is False,
`why_not()` explains in a sentence what to do, and the slower torch reference is used. It links to neither Python nor
torch and receives only addresses and lengths; `ops` has checked every tensor before. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from peerd.codec.format.blockwise import CODES, scale_count
from peerd.codec.kernels.reference import CodingOutputs, contiguous, room_for

ISAS: Final = ("plain", "avx2", "avx512", "avx512-vbmi", "neon")  # in the order of the library's numbers

_ABI: Final = 2
_FOLDER = Path(__file__).parent
_REMEDY: Final = "CPU tensors are encoded by plain torch, many times slower; reinstall peerd with a C++ compiler"
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_POINTER, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class _Library:
    """The typed functions of a loaded library. Raises OSError or AttributeError if the file is not peerd's library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.abi = library.peerd_abi
        self.isa = library.peerd_isa
        self.use_isa = library.peerd_use_isa
        self.quantize = library.peerd_quantize
        self.dequantize = library.peerd_dequantize
        self.quantize_missing = library.peerd_quantize_missing
        self.dequantize_onto = library.peerd_dequantize_onto
        self.scales = library.peerd_scales
        self.use_isa.argtypes = (_INT,)
        self.quantize.argtypes = (_POINTER, _INT, _INT64, _INT, _INT, _POINTER, _POINTER)
        self.dequantize.argtypes = (_POINTER, _POINTER, _INT64, _INT, _INT, _POINTER, _INT)
        self.quantize_missing.argtypes = (_POINTER, _INT64, _INT, _INT, *(_POINTER,) * 3, _INT, _POINTER)
        self.dequantize_onto.argtypes = (_POINTER, _POINTER, _INT64, _INT, _INT, _POINTER, _POINTER)
        self.scales.argtypes = (_POINTER, _INT, _INT64, _INT, _POINTER)


def available() -> bool:
    """True if the library was built and can be loaded on this machine."""
    return isinstance(_load(), _Library)


def why_not() -> str:
    """One sentence why the library is not used, with the effect and the remedy; empty if it is used."""
    found = _load()
    return found if isinstance(found, str) else ""


def isa() -> str:
    """The instruction set in use, one of ISAS."""
    return ISAS[_library().isa()]


def use_isa(name: str) -> None:
    """Switch to another instruction set, for tests and benchmarks. Raises ValueError if this machine lacks it."""
    if name not in ISAS or _library().use_isa(ISAS.index(name)):
        raise ValueError(f"this build or processor has no {name}")


def isas() -> list[str]:
    """The instruction sets that this build and processor support; empty without a library."""
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
    """Codes (uint8, flat) and scales (float32, one per block) of `x` (float32, bfloat16 or float16 on a CPU; any
    shape).

    They are written into `codes` and `scales` if given: contiguous, of exactly that size.
    """
    x = contiguous(x)
    codes, scales = room_for(x, code, block, codes, scales)
    places = scales.data_ptr(), codes.data_ptr()
    _done(_library().quantize(x.data_ptr(), _DTYPES[x.dtype], x.numel(), CODES[code].number, _log2(block), *places))
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, code: str, block: int, out: Tensor) -> Tensor:
    """Decode into `out`, which has the shape and dtype of the encoded values; returns it. All tensors are contiguous.

    Accepts any codes and scales.
    """
    places, kind = (codes.data_ptr(), scales.data_ptr()), (CODES[code].number, _log2(block))
    _done(_library().dequantize(*places, out.numel(), *kind, out.data_ptr(), _DTYPES[out.dtype]))
    return out


def quantize_missing(x: Tensor, code: str, block: int, codes: Tensor, scales: Tensor, beside: CodingOutputs) -> None:
    """Like `quantize`, for float32; also writes the coding error and the decoded values to `beside`."""
    kept = _address(beside.missed), beside.more, _address(beside.seen)
    places = scales.data_ptr(), codes.data_ptr(), *kept
    _done(_library().quantize_missing(x.data_ptr(), x.numel(), CODES[code].number, _log2(block), *places))


def dequantize_onto(codes: Tensor, scales: Tensor, code: str, block: int, base: Tensor, out: Tensor) -> None:
    """Set `out`, which may be `base`, to base plus the decoded values, all float32."""
    places, kind = (codes.data_ptr(), scales.data_ptr()), (CODES[code].number, _log2(block))
    _done(_library().dequantize_onto(*places, out.numel(), *kind, base.data_ptr(), out.data_ptr()))


def block_scales(x: Tensor, block: int) -> Tensor:
    """The scales alone, which show whether `x` can be encoded."""
    x = contiguous(x)
    scales = torch.empty(scale_count(x.numel(), block), dtype=torch.float32)
    _done(_library().scales(x.data_ptr(), _DTYPES[x.dtype], x.numel(), _log2(block), scales.data_ptr()))
    return scales


def _library() -> _Library:
    found = _load()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


@cache
def _load() -> _Library | str:
    """The library, or the reason why it cannot be loaded."""
    path = next((path for path in _candidates(_FOLDER) if path.exists()), None)
    if path is None:
        return f"the compiled kernels of blockwise quantization were not built: {_REMEDY}"
    try:
        library = _Library(path)
    except (OSError, AttributeError) as error:
        return f"the compiled kernels of blockwise quantization cannot be loaded ({error}): {_REMEDY}"
    if library.abi() != _ABI:
        return f"the compiled kernels of blockwise quantization are of another version of peerd ({path}): {_REMEDY}"
    return library


def _candidates(folder: Path) -> list[Path]:
    """Paths at which builds for this interpreter put the library, the most specific name first."""
    return [folder / f"_blockwise{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _log2(block: int) -> int:
    return block.bit_length() - 1


def _done(status: int) -> None:
    if status:
        raise RuntimeError(f"the compiled kernels rejected a call ({status})")
