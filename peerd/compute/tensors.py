"""Between torch tensors and what travels: frames for the wire, digests for comparing states.

Zero copy where the memory allows it; on little-endian machines memory and wire are the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


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
