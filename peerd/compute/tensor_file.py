"""Writing a state as a safetensors file, piece by piece.

The file is the length of a JSON header (8 bytes, little-endian), the header, and the values of all tensors without
gaps: those with the widest values first, so that all are aligned, and equally wide ones by name. It is written in the
order in which a `FrozenState` is read.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Final

import msgspec

from peerd.compute.frozen_state import FrozenState
from peerd.core.frame import DTYPES
from peerd.core.messages.state import TensorSpec

_NAMES: Final = {
    **{"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16", "bool": "BOOL"},
    **{"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8"},
}
_ALIGN_BYTES: Final = 8  # of the header, by spaces at its end


def write_state(path: Path, state: FrozenState) -> bytes:
    """Write a new file; returns the state's digest, as `tensors.state_digest` has it."""
    header, begins = _header(state.specs)
    digest, hashed = hashlib.sha256(), -1
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        data = file.tell()
        for tensor, begin, piece in state.pieces():
            hashed = _hash_names(digest, state.specs, hashed, tensor)
            digest.update(piece)
            file.seek(data + begins[tensor] + begin)
            file.write(piece)
        _hash_names(digest, state.specs, hashed, len(state.specs) - 1)
    return digest.digest()


def _header(specs: list[TensorSpec]) -> tuple[bytes, list[int]]:
    """The header, and where each tensor begins behind it."""
    begins, end = [0] * len(specs), 0
    described: dict[str, object] = {}
    for index in sorted(range(len(specs)), key=lambda i: (-DTYPES[specs[i].dtype].itemsize, specs[i].name)):
        spec, begins[index] = specs[index], end
        end += spec.nbytes
        described[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[index], end],
        }
    header = msgspec.json.encode(described)
    return header + b" " * (-len(header) % _ALIGN_BYTES), begins


def _hash_names(digest: hashlib._Hash, specs: list[TensorSpec], done: int, tensor: int) -> int:
    """Add what stands before each tensor's values, of those after `done` up to `tensor`; returns `tensor`."""
    for spec in specs[done + 1 : tensor + 1]:
        digest.update(f"{spec.name}\0{spec.dtype}\0{list(spec.shape)}\0".encode())
    return tensor
