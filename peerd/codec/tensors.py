"""Conversion between torch tensors and bytes: raw values, dtype names, digests for comparing states.

Memory and wire use the same bytes, because both are little-endian. `codec/frames` encodes tensors into frames.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from peerd.codec.format.frame import DTYPES
from peerd.core.errors import LocalError

if sys.byteorder != "little":
    raise LocalError("peerd needs a little-endian machine: tensors are sent as they are in memory")

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPES}


def all_finite(tensor: Tensor) -> bool:
    """True if no value is NaN or infinite. One fast sum nearly always decides: it is finite only if all values are."""
    if not tensor.is_floating_point():
        return True
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def all_finite_in(tensors: Sequence[Tensor]) -> bool:
    """True if no value of any tensor is NaN or infinite. Waits once per GPU, not once per tensor."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return all(map(all_finite, tensors))
    sums = [tensor.sum().float() for tensor in tensors if tensor.is_floating_point()]
    each = (bool(torch.isfinite(torch.stack(of_one)).all()) for of_one in _by_device(sums))
    return all(each) or all(map(all_finite, tensors))


def largest_in(tensors: Iterable[Tensor]) -> float:
    """The largest absolute value of all tensors; NaN if any value is NaN; 0 if there are no values. Waits once per GPU.

    Torch's maximum norm gives the same, but takes many times as long on a CPU.
    """
    extremes = [torch.stack(torch.aminmax(tensor.detach())) for tensor in tensors if tensor.numel()]
    found = [float(torch.stack(of_one).abs().max()) for of_one in _by_device(extremes)]
    return float(torch.tensor(found, dtype=torch.float64).max()) if found else 0.0


def _by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The tensors, grouped by device."""
    found: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())


def raw_bytes(tensor: Tensor) -> memoryview:
    """The values in C order, as they are in memory; shares memory with a contiguous CPU tensor."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def state_digest(state: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over name, dtype, shape and values of every tensor, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name}\0{dtype_name(tensor.dtype)}\0{list(tensor.shape)}\0".encode())
        digest.update(raw_bytes(tensor))
    return digest.digest()


def fits(shape: tuple[int, ...], wanted: Sequence[int | None]) -> bool:
    """True if `shape` matches `wanted`, where None allows any length."""
    return len(shape) == len(wanted) and all(b is None or a == b for a, b in zip(shape, wanted, strict=True))


def values_of(payload: memoryview, dtype: torch.dtype) -> Tensor:
    """View a payload as a flat tensor of whole values; copies it if it is read-only or misaligned."""
    if payload.nbytes == 0:
        return torch.empty(0, dtype=dtype)
    if not payload.readonly:
        tensor = torch.frombuffer(payload, dtype=dtype)
        if tensor.data_ptr() % dtype.itemsize == 0:
            return tensor
    tensor = torch.empty(payload.nbytes // dtype.itemsize, dtype=dtype)
    raw_bytes(tensor)[:] = payload
    return tensor
