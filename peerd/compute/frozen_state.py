"""Snapshot of a state, to be read once from its first tensor to its last while training goes on.

Freezing copies nothing. The tensors that were not read yet are copied just before the parameters change (`Changes`),
and freed as they are read. A reader that finishes before the next step needs memory for one piece; a slow one needs as
much as remains to be read. Any thread may read.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

from peerd.compute.changes import Changes
from peerd.compute.tensors import dtype_name, raw_bytes
from peerd.core.errors import NoMemory, WorkCancelled
from peerd.core.frame import DTYPES
from peerd.core.messages.state import TensorSpec

PIECE_BYTES: Final = 4 << 20
_SAFETENSORS_NAMES: Final = {
    **{"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16", "bool": "BOOL"},
    **{"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8"},
}
_ALIGN_BYTES: Final = 8  # of the header, padded with spaces


class FrozenState:
    """Snapshot of one state, read piece by piece. `specs` are sorted by name, and tensors are read in that order."""

    def __init__(self, state: Mapping[str, Tensor], changes: Changes | None = None) -> None:
        """`changes` reports each change of the live tensors; None if they never change."""
        self.specs = [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in sorted(state.items())]
        self._tensors: list[Tensor | None] = [tensor.detach() for _, tensor in sorted(state.items())]
        self._live = changes is not None
        self._lacks_memory = self._is_given_up = False
        self._at = 0  # index of the tensor being read; earlier ones are done
        self._lock = threading.Lock()
        if changes is not None:
            changes.announce_to(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def give_up(self) -> None:
        """Make every later read raise GivenUp, because the rest of the state is no longer needed."""
        self._is_given_up = True  # without the lock, which a copy may hold for a long time

    def read(self, tensor: int, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end` of a tensor; tensors must be read in order.

        Raises NoMemory if the rest could not be copied before a change, GivenUp after `give_up`.
        """
        with self._lock:
            if self._is_given_up:
                raise WorkCancelled("the rest of the state is no longer needed")
            if self._lacks_memory:
                raise NoMemory("there was no memory to copy the rest of the state before the next step")
            for done in range(self._at, tensor):
                self._tensors[done] = None
            self._at = tensor
            found = self._tensors[tensor]
            assert found is not None
            part = found.reshape(-1).view(torch.uint8)[begin:end]
            return raw_bytes(part.clone() if self._live and part.device.type == "cpu" else part)

    def pieces(self) -> Iterator[tuple[int, int, memoryview]]:
        """All bytes, piece by piece: index of the tensor, offset in it, and bytes."""
        for tensor, spec in enumerate(self.specs):
            for begin in range(0, spec.nbytes, PIECE_BYTES):
                yield tensor, begin, self.read(tensor, begin, min(begin + PIECE_BYTES, spec.nbytes))

    def before_change(self) -> None:
        """Copy the unread tensors; called by the thread that is about to change them."""
        with self._lock:
            if not self._live or self._is_given_up:
                return
            self._live = False
            for index in range(self._at, len(self._tensors)):
                found = self._tensors[index]
                assert found is not None
                try:
                    self._tensors[index] = found.to("cpu", copy=True)
                except (MemoryError, RuntimeError):  # torch has no type of its own for a CPU out of memory
                    self._lacks_memory, self._tensors = True, []
                    return


def write_state(path: Path, state: FrozenState) -> bytes:
    """Write a new safetensors file, piece by piece; returns the state's digest as in `tensors.state_digest`.

    The file consists of the length of a JSON header (8 bytes, little-endian), the header, and the values of all tensors
    without gaps. Tensors with wider values come first, so that all are aligned; those of equal width are sorted by
    name.
    """
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
    """The header, and the offset of each tensor after it."""
    begins, end = [0] * len(specs), 0
    described: dict[str, object] = {}
    for index in sorted(range(len(specs)), key=lambda i: (-DTYPES[specs[i].dtype].itemsize, specs[i].name)):
        spec, begins[index] = specs[index], end
        end += spec.nbytes
        described[spec.name] = {
            "dtype": _SAFETENSORS_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[index], end],
        }
    header = msgspec.json.encode(described)
    return header + b" " * (-len(header) % _ALIGN_BYTES), begins


def _hash_names(digest: hashlib._Hash, specs: list[TensorSpec], done: int, tensor: int) -> int:
    """Add the descriptions (name, dtype, shape) of the tensors after `done` up to `tensor`; returns `tensor`."""
    for spec in specs[done + 1 : tensor + 1]:
        digest.update(f"{spec.name}\0{spec.dtype}\0{list(spec.shape)}\0".encode())
    return tensor
