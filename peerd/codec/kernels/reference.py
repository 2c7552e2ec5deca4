"""Blockwise quantization in plain torch: the definition that the C++ and CUDA kernels reproduce bit for bit.

Runs on any torch device, and is used where no kernel is available. It processes the tensor in slices, so that
temporaries stay small. In the code, n = x * (1 / scale) in single precision; tables.py has the constants. A block with
NaN, infinity or a magnitude beyond 3e38 keeps the bits of its largest magnitude as its scale and has zero codes;
senders check the scales.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from peerd.codec.format.blockwise import CODES, code_bytes, scale_count
from peerd.codec.kernels import tables

_SLICE_VALUES: Final = 1 << 18
_E4M3_MAX: Final = 448.0


@dataclass(frozen=True, slots=True)
class CodingOutputs:
    """Tensors that receive further outputs of encoding flat values, besides codes and scales; None if not wanted.

    `missed` receives the values minus their decoded codes, added to its contents if `more`. `seen` receives the decoded
    values; it may be the tensor of the values itself.
    """

    missed: Tensor | None = None
    more: bool = False
    seen: Tensor | None = None

    def take(self, values: Tensor, decoded: Tensor) -> None:
        """Compute the outputs in separate passes, for an implementation that does not write them while encoding."""
        if self.missed is not None and self.more:
            self.missed.add_(values - decoded)
        elif self.missed is not None:
            torch.sub(values, decoded, out=self.missed)
        if self.seen is not None:
            self.seen.copy_(decoded)


def quantize(
    x: Tensor, code: str, block: int, codes: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes (uint8, flat) and scales (float32, one per block) of `x` (float32, bfloat16 or float16; any shape).

    They are written into `codes` and `scales` if given: contiguous, of exactly that size, on x's device.
    """
    flat = x.detach().reshape(-1)
    count = flat.numel()
    codes, scales = room_for(x, code, block, codes, scales)
    bits, scales_at = CODES[code].bits, 0
    for at in range(0, count, _SLICE_VALUES):
        part_NB = _blocks(flat[at : at + _SLICE_VALUES].float(), block)
        valid = min(count - at, _SLICE_VALUES)
        scale_N = _scales(part_NB)
        usable_N = _usable(scale_N)
        inverse_N = torch.where(usable_N, scale_N.reciprocal(), 0.0)
        code_NB = _ENCODERS[code](part_NB, part_NB * inverse_N[:, None])
        code_NB = torch.where(usable_N[:, None], code_NB, _ZERO[code])
        packed = code_NB.reshape(-1)[:valid]
        if bits == 4:
            packed = _pack(packed)
        begin = at * bits // 8
        codes.view(-1)[begin : begin + packed.numel()] = packed
        scales.view(-1)[scales_at : scales_at + len(scale_N)] = scale_N
        scales_at += len(scale_N)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, code: str, block: int, out: Tensor) -> Tensor:
    """Decode into `out`, a contiguous tensor with the shape and dtype of the encoded values; returns it."""
    flat = out.view(-1)
    count, bits = flat.numel(), CODES[code].bits
    for at in range(0, count, _SLICE_VALUES):
        valid = min(count - at, _SLICE_VALUES)
        begin = at * bits // 8
        part = codes.view(-1)[begin : begin + -(-valid * bits // 8)]
        if bits == 4:
            part = torch.stack((part & 15, part >> 4), dim=1).reshape(-1)[:valid]
        part_NB = _blocks(part, block)
        scale_N = scales.view(-1)[at // block :][: len(part_NB)]
        flat[at : at + valid] = _DECODERS[code](part_NB, scale_N[:, None]).reshape(-1)[:valid].to(out.dtype)
    return out


def quantize_missing(x: Tensor, code: str, block: int, codes: Tensor, scales: Tensor, beside: CodingOutputs) -> None:
    """Like `quantize`, for float32; also writes the coding error and the decoded values to `beside`."""
    quantize(x, code, block, codes, scales)
    decoded = dequantize(codes, scales, code, block, torch.empty_like(x))
    beside.take(x, decoded)


def dequantize_onto(codes: Tensor, scales: Tensor, code: str, block: int, base: Tensor, out: Tensor) -> None:
    """Set `out`, which may be `base`, to base plus the decoded values, all float32."""
    torch.add(base, dequantize(codes, scales, code, block, torch.empty_like(out)), out=out)


def block_scales(x: Tensor, block: int) -> Tensor:
    """The scales alone, which show whether `x` can be encoded."""
    flat = x.detach().reshape(-1)
    starts = range(0, flat.numel(), _SLICE_VALUES)
    parts = [_scales(_blocks(flat[at : at + _SLICE_VALUES].float(), block)) for at in starts]
    return torch.cat(parts) if parts else torch.empty(0, device=x.device)


def room_for(
    x: Tensor, code: str, block: int, codes: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Tensors for the codes and scales of `x`: the given ones, or new ones on its device."""
    if codes is None:
        codes = torch.empty(code_bytes(x.numel(), code), dtype=torch.uint8, device=x.device)
    if scales is None:
        scales = torch.empty(scale_count(x.numel(), block), dtype=torch.float32, device=x.device)
    return codes, scales


def contiguous(values: Tensor) -> Tensor:
    """The values in C order, detached if copied; the tensor itself if it is contiguous."""
    return values if values.is_contiguous() else values.detach().contiguous()


def _blocks(values: Tensor, block: int) -> Tensor:
    """The values as rows of one block each; the last row is padded with zeros."""
    rows = scale_count(values.numel(), block)
    if values.numel() != rows * block:
        values = torch.nn.functional.pad(values, (0, rows * block - values.numel()))
    return values.view(rows, block)


def _scales(part_NB: Tensor) -> Tensor:
    """Largest magnitude of each block, compared as the integers of its bits, so that NaN wins and order does not
    matter.
    """
    largest_N = (part_NB.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(dim=1)
    return torch.where(largest_N <= tables.SMALLEST_BITS, 0, largest_N).view(torch.float32)


def _usable(scale_N: Tensor) -> Tensor:
    bits_N = scale_N.view(torch.int32)
    return (bits_N > 0) & (bits_N <= tables.LARGEST_BITS)


def _pack(nibbles: Tensor) -> Tensor:
    """Two codes per byte, the earlier one in the lower half."""
    if nibbles.numel() % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    pairs = nibbles.view(-1, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


# --- codes: (values, values * inverse scale) -> uint8 codes; (codes, scales) -> values ------------------------------


def _encode_dynamic(x: Tensor, n: Tensor) -> Tensor:
    magnitude = torch.bucketize(n.abs(), _table(tables.DYNAMIC_THRESHOLDS, n.device), right=True)
    return (magnitude | torch.signbit(x).to(torch.int64) << 7).to(torch.uint8)


def _decode_dynamic(code: Tensor, scale: Tensor) -> Tensor:
    magnitudes = _table(tables.DYNAMIC, code.device)
    return torch.cat((magnitudes, -magnitudes))[code.long()] * scale


def _encode_int8(_: Tensor, n: Tensor) -> Tensor:
    return (n * 127.0).round().to(torch.int8).view(torch.uint8)


def _decode_int8(code: Tensor, scale: Tensor) -> Tensor:
    return code.view(torch.int8).clamp(min=-127).float() * (scale * _single(tables.INV127_BITS))


def _encode_int4(_: Tensor, n: Tensor) -> Tensor:
    return ((n * 7.0).round() + 8.0).to(torch.uint8)


def _decode_int4(code: Tensor, scale: Tensor) -> Tensor:
    return (code.float() - 8.0).clamp(min=-7.0) * (scale * _single(tables.INV7_BITS))


def _encode_nf4(_: Tensor, n: Tensor) -> Tensor:
    return torch.bucketize(n, _table(tables.NF4_THRESHOLDS, n.device), right=True).to(torch.uint8)


def _decode_nf4(code: Tensor, scale: Tensor) -> Tensor:
    return _table(tables.NF4, code.device)[code.long()] * scale


def _encode_e4m3(_: Tensor, n: Tensor) -> Tensor:
    return (n * _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _decode_e4m3(code: Tensor, scale: Tensor) -> Tensor:
    code = torch.where(code & 0x7F == 0x7F, code - 1, code)  # NaN decodes to the largest value
    return code.view(torch.float8_e4m3fn).float() * (scale * _single(tables.INV448_BITS))


_ENCODERS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "dynamic8": _encode_dynamic,
    "int8": _encode_int8,
    "int4": _encode_int4,
    "nf4": _encode_nf4,
    "fp8-e4m3": _encode_e4m3,
}
_DECODERS: Final[dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "dynamic8": _decode_dynamic,
    "int8": _decode_int8,
    "int4": _decode_int4,
    "nf4": _decode_nf4,
    "fp8-e4m3": _decode_e4m3,
}
_ZERO: Final = {"dynamic8": 0, "int8": 0, "int4": 8, "nf4": 7, "fp8-e4m3": 0}


def _single(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


@cache
def _table(bits: Sequence[int], device: torch.device) -> Tensor:
    """The constants as a float32 tensor on the device."""
    return torch.tensor([_single(value) for value in bits], dtype=torch.float32, device=device)
