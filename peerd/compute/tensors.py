"""Between torch tensors and what travels: frames for the wire, digests for comparing states.

Zero copy where the memory allows it: an uncoded CPU tensor's frame shares its memory (so the tensor must not change
while the frame is sent), and a tensor made from a writable payload shares the payload's. Memory and wire are the
same bytes because both are little-endian.

A hostile peer may send: another shape or dtype than asked for, a payload of another length, NaN and infinity, a bool
that is neither 0 nor 1. Everything but the last (it counts as true) raises `ProtocolViolation` with the tensor's name.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.frame import DTYPES, TensorFrame, expected_bytes

if sys.byteorder != "little":
    raise LocalError("peerd needs a little-endian machine: tensors travel as they lie in memory")

_TORCH: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPES}
_CODED: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}  # what a floating-point payload is rounded to
_FP16_MAX: Final = 65504.0


def to_frame(tensor: Tensor, coding: str = "none") -> TensorFrame:
    """The tensor as a frame; shares memory with a contiguous CPU tensor when `coding` is "none".

    "bf16" and "fp16" round floating-point values to nearest; other dtypes travel uncoded. Beyond fp16's range a value
    becomes its largest. LocalError for a dtype or coding that frames do not have.
    """
    name = dtype_name(tensor.dtype)
    if name not in DTYPES or coding not in ("none", *_CODED):
        raise LocalError(f"no frame for a tensor of {name} in coding {coding!r}")
    shape = tuple(tensor.shape)
    if coding == "none" or not tensor.is_floating_point():
        return TensorFrame(name, shape, raw_bytes(tensor))
    tensor = tensor.detach()
    coded = tensor.clamp(-_FP16_MAX, _FP16_MAX) if coding == "fp16" else tensor
    return TensorFrame(name, shape, raw_bytes(coded.to(_CODED[coding])), coding)


def from_frame(
    frame: TensorFrame,
    shape: Sequence[int | None] | None = None,
    dtype: torch.dtype | None = None,
    *,
    name: str = "a tensor",
    finite: bool = False,
) -> Tensor:
    """The tensor on the CPU; ProtocolViolation when it is not what the caller expects.

    `shape`: None stands for any length of that dim, or of all; `dtype`: None for any. With `finite`, NaN and
    infinity are refused too. Shares memory with a writable, aligned payload that is not coded.
    """
    found = _TORCH.get(frame.dtype)
    if found is None or (dtype is not None and found != dtype):
        wanted = f"; expected {dtype_name(dtype)}" if dtype is not None else ""
        raise ProtocolViolation(f"{name} is of {frame.dtype}{wanted}")
    if shape is not None and not _fits(frame.shape, shape):
        dims = ", ".join("any" if dim is None else str(dim) for dim in shape)
        raise ProtocolViolation(f"{name} has shape {list(frame.shape)}; expected [{dims}]")
    try:
        expected = expected_bytes(frame.dtype, frame.shape, frame.coding)
    except ValueError as error:
        raise ProtocolViolation(f"{name}: {error}") from None
    payload = memoryview(frame.payload).cast("B")
    if payload.nbytes != expected:
        raise ProtocolViolation(f"{name} has {payload.nbytes} payload bytes; expected {expected}")
    if frame.coding not in ("none", *_CODED):
        raise ProtocolViolation(f"{name} is coded as {frame.coding}; expected none, {', '.join(_CODED)}")
    tensor = _decode(payload, found, _CODED.get(frame.coding)).view(frame.shape)
    if finite and not all_finite(tensor):
        raise ProtocolViolation(f"{name} has values that are not finite")
    return tensor


def all_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. One fast sum decides nearly always: it is finite only if all are."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The values in C order, as they lie in memory; shares memory with a contiguous CPU tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` is `float32`."""
    return str(dtype).removeprefix("torch.")


def state_digest(state: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over name, dtype, shape and values of every tensor, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name}\0{dtype_name(tensor.dtype)}\0{list(tensor.shape)}\0".encode())
        digest.update(raw_bytes(tensor))
    return digest.digest()


def _fits(shape: tuple[int, ...], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def _decode(payload: memoryview, dtype: torch.dtype, coded: torch.dtype | None) -> Tensor:
    """Flat tensor of a payload whose length was checked."""
    if coded is not None:
        return _values(payload, coded).to(dtype)
    if dtype is torch.bool:
        return _values(payload, torch.uint8).ne(0)
    return _values(payload, dtype)


def _values(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """The payload itself as a tensor where it is writable and aligned, else a copy."""
    if payload.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    if not payload.readonly:
        tensor = torch.frombuffer(payload, dtype=dtype)
        if tensor.data_ptr() % dtype.itemsize == 0:
            return tensor
    tensor = torch.empty(payload.nbytes // dtype.itemsize, dtype=dtype)
    raw_bytes(tensor)[:] = payload
    return tensor
