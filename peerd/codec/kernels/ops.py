"""Blockwise quantization as torch operators: arguments are checked here, and the fastest available implementation runs.

The operators are `torch.ops.peerd.quantize_blockwise`, `dequantize_blockwise` (each with an `.out` overload that writes
into given tensors and returns nothing) and `block_scales`. They have fakes, so they can be traced and compiled; they
are not differentiable. CPU tensors use the C++ kernels, CUDA tensors the kernels compiled at run time, and both fall
back to the plain torch reference; the bits are the same.

For sums on the CPU, where each pass through memory counts, `quantize_missing` and `dequantize_onto` do two or three
operations in one pass. They are plain functions, since nothing traces them.

Codes are flat uint8, scales flat float32 (see `codec/format/blockwise`). `all_coded` detects the scale of a block that
cannot be encoded (NaN, infinity, beyond 3e38).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from peerd.codec.format.blockwise import BLOCKS, CODES, code_bytes, scale_count
from peerd.codec.kernels import native, reference, tables
from peerd.codec.kernels.reference import CodingOutputs

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES: Final = ("cpu", "cuda")

torch.library.define("peerd::quantize_blockwise", "(Tensor x, str code, int block) -> (Tensor, Tensor)")
torch.library.define(
    "peerd::quantize_blockwise.out",
    "(Tensor x, str code, int block, *, Tensor(a!) codes, Tensor(b!) scales) -> ()",
)
torch.library.define(
    "peerd::dequantize_blockwise",
    "(Tensor codes, Tensor scales, str code, int block, SymInt[] shape, ScalarType dtype) -> Tensor",
)
torch.library.define(
    "peerd::dequantize_blockwise.out",
    "(Tensor codes, Tensor scales, str code, int block, *, Tensor(a!) out) -> ()",
)
torch.library.define("peerd::block_scales", "(Tensor x, int block) -> Tensor")

# Not differentiable: without this, results from tensors that require gradients would be marked as differentiable.
for _name in ("quantize_blockwise", "quantize_blockwise.out", "dequantize_blockwise", "dequantize_blockwise.out"):
    torch.library.impl(f"peerd::{_name}", "Autograd", torch.library.fallthrough_kernel)
torch.library.impl("peerd::block_scales", "Autograd", torch.library.fallthrough_kernel)

_fake: Callable[[str], Callable[[Any], Any]] = torch.library.register_fake  # it has no annotations


class Kernels(Protocol):
    """Interface of an implementation; `ops` has checked the tensors."""

    def quantize(
        self, x: Tensor, code: str, block: int, codes: Tensor | None = None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def dequantize(self, codes: Tensor, scales: Tensor, code: str, block: int, out: Tensor) -> Tensor: ...

    def block_scales(self, x: Tensor, block: int) -> Tensor: ...


class CpuKernels(Kernels, Protocol):
    """Interface of a CPU implementation; flat, contiguous float32."""

    def quantize_missing(
        self, x: Tensor, code: str, block: int, codes: Tensor, scales: Tensor, beside: CodingOutputs
    ) -> None: ...

    def dequantize_onto(
        self, codes: Tensor, scales: Tensor, code: str, block: int, base: Tensor, out: Tensor
    ) -> None: ...


def best(device: torch.device) -> Kernels:
    """The fastest implementation that works for tensors on `device`."""
    if device.type == "cpu":
        return best_on_cpu()
    if device.type == "cuda":
        from peerd.codec.kernels import cuda  # not needed where there is no GPU

        if cuda.available(device):
            return cuda
    return reference


def best_on_cpu() -> CpuKernels:
    return native if native.available() else reference


def described(device: torch.device | str) -> tuple[str, str]:
    """Name of the implementation used on `device` and, if that is slow plain torch, one sentence with reason and
    remedy.
    """
    device = torch.device(device)
    if device.type == "cuda":
        from peerd.codec.kernels import cuda

        why_not = cuda.why_not(device)
        return ("plain torch on the GPU", why_not) if why_not else ("CUDA kernels", "")
    why_not = native.why_not()
    return ("plain torch", why_not) if why_not else (f"C++ kernels ({native.isa()})", "")


def all_coded(scales: Tensor) -> bool:
    """True if every block could be encoded: False if a value was NaN, infinite or beyond 3e38."""
    return not bool((scales.view(torch.int32) > tables.LARGEST_BITS).any())


def quantize_missing(x: Tensor, code: str, block: int, *, codes: Tensor, scales: Tensor, beside: CodingOutputs) -> None:
    """Encode flat float32 values on the CPU; also writes the coding error and the decoded values to `beside`.

    Raises ValueError for tensors that do not fit.
    """
    _check(x, code, block)
    _check_coded(codes, scales, x, code, block)
    _check_singles(x, *(each for each in (beside.missed, beside.seen) if each is not None))
    best_on_cpu().quantize_missing(x, code, block, codes, scales, beside)


def dequantize_onto(codes: Tensor, scales: Tensor, code: str, block: int, *, base: Tensor, out: Tensor) -> None:
    """Set `out`, which may be `base`, to base plus the decoded values: flat float32 on the CPU. Raises ValueError as
    above.
    """
    _check(out, code, block)
    _check_coded(codes, scales, out, code, block)
    _check_singles(out, base)
    best_on_cpu().dequantize_onto(codes, scales, code, block, base, out)


@torch.library.impl("peerd::quantize_blockwise", _DEVICES)
def _quantize(x: Tensor, code: str, block: int) -> tuple[Tensor, Tensor]:
    _check(x, code, block)
    return best(x.device).quantize(x, code, block)


@torch.library.impl("peerd::quantize_blockwise.out", _DEVICES)
def _quantize_out(x: Tensor, code: str, block: int, *, codes: Tensor, scales: Tensor) -> None:
    _check(x, code, block)
    _check_coded(codes, scales, x, code, block)
    best(x.device).quantize(x, code, block, codes, scales)
    for written in (codes, scales):
        increment_version(written)


@torch.library.impl("peerd::dequantize_blockwise", _DEVICES)
def _dequantize(
    codes: Tensor, scales: Tensor, code: str, block: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    _check(out, code, block)
    _check_coded(codes, scales, out, code, block)
    return best(out.device).dequantize(codes, scales, code, block, out)


@torch.library.impl("peerd::dequantize_blockwise.out", _DEVICES)
def _dequantize_out(codes: Tensor, scales: Tensor, code: str, block: int, *, out: Tensor) -> None:
    _check(out, code, block)
    _check_coded(codes, scales, out, code, block)
    kernels = best(out.device)
    if out.is_contiguous():
        kernels.dequantize(codes, scales, code, block, out)
        increment_version(out)  # tells autograd, which may have saved this tensor, that a kernel changed it
    else:
        out.copy_(kernels.dequantize(codes, scales, code, block, torch.empty_like(out).contiguous()))


@torch.library.impl("peerd::block_scales", _DEVICES)
def _block_scales(x: Tensor, block: int) -> Tensor:
    _check(x, "int8", block)
    return best(x.device).block_scales(x, block)


@_fake("peerd::quantize_blockwise")
def _fake_quantize(x: Tensor, code: str, block: int) -> tuple[Tensor, Tensor]:
    _check(x, code, block)
    return reference.room_for(x, code, block)


@_fake("peerd::quantize_blockwise.out")
def _fake_quantize_out(x: Tensor, code: str, block: int, *, codes: Tensor, scales: Tensor) -> None:
    _check(x, code, block)
    _check_coded(codes, scales, x, code, block)


@_fake("peerd::dequantize_blockwise")
def _fake_dequantize(
    codes: Tensor, scales: Tensor, code: str, block: int, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    out = codes.new_empty(shape, dtype=dtype)
    _check(out, code, block)
    _check_coded(codes, scales, out, code, block)
    return out


@_fake("peerd::dequantize_blockwise.out")
def _fake_dequantize_out(codes: Tensor, scales: Tensor, code: str, block: int, *, out: Tensor) -> None:
    _check(out, code, block)
    _check_coded(codes, scales, out, code, block)


@_fake("peerd::block_scales")
def _fake_block_scales(x: Tensor, block: int) -> Tensor:
    _check(x, "int8", block)
    return x.new_empty(scale_count(x.numel(), block), dtype=torch.float32)


def _check(values: Tensor, code: str, block: int) -> None:
    """Raises ValueError unless the values can be encoded with this code and block size."""
    if code not in CODES:
        raise ValueError(f"unknown code {code!r}; allowed: {', '.join(CODES)}")
    if block not in BLOCKS:
        raise ValueError(f"a block size of {block}; allowed: {', '.join(map(str, BLOCKS))}")
    if values.dtype not in DTYPES:
        raise ValueError(f"values of {values.dtype}; allowed: float32, bfloat16, float16")


def _check_coded(codes: Tensor, scales: Tensor, values: Tensor, code: str, block: int) -> None:
    """Raises ValueError unless codes and scales have the sizes that `values` needs."""
    count = values.numel()
    for name, tensor, dtype, length in (
        ("codes", codes, torch.uint8, code_bytes(count, code)),
        ("scales", scales, torch.float32, scale_count(count, block)),
    ):
        if tensor.dtype != dtype or tensor.numel() != length or not tensor.is_contiguous():
            raise ValueError(
                f"{name} for {count} values must be {length} contiguous {dtype}, not {tensor.numel()} of {tensor.dtype}"
            )
        if tensor.device != values.device:
            raise ValueError(f"{name} are on {tensor.device}, the values on {values.device}")


def _check_singles(values: Tensor, *others: Tensor) -> None:
    """Raises ValueError unless all tensors are flat, contiguous float32 on the CPU, and equally long."""
    for tensor in (values, *others):
        fits = tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()
        if not fits or tensor.shape != (values.numel(),):
            found = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            raise ValueError(f"expected contiguous float32 of shape [{values.numel()}] on the CPU, not {found}")
