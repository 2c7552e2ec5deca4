"""Snapshot of a model's state, to be read once from its first tensor to its last while training goes on.

Freezing copies nothing. The tensors that were not read yet are copied just before the parameters change (`Changes`):
to a file if `make_room` provides one, otherwise to memory, which is freed as it is read. A reader that finishes before
the next step needs memory for one piece; a slow one, for everything that it has not read yet. If there is no memory for
the copy, the parameters change anyway, and the reader gets NoMemory. Any thread may read.
"""

from __future__ import annotations

import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec
import torch
from torch import Tensor

from peerd.codec.format.frame import DTYPES
from peerd.codec.tensors import dtype_name, raw_bytes
from peerd.core.errors import NoMemory, WorkCancelled
from peerd.messages.state import TensorSpec
from peerd.model.changes import Changes

PIECE_BYTES: Final = 4 << 20
_SAFETENSORS_NAMES: Final = {
    **{"float32": "F32", "float64": "F64", "bfloat16": "BF16", "float16": "F16", "bool": "BOOL"},
    **{"int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8"},
}
_ALIGN_BYTES: Final = 8  # of the header, padded with spaces


class MappedRoom(Protocol):
    """Memory that the system can write to disk, such as a `state.state_room.StateRoom`."""

    row: memoryview

    def used(self, count: int) -> None:
        """Count bytes that were read or written."""
        ...


MakeRoom = Callable[[int], MappedRoom | None]  # bytes -> mapped memory, or None for ordinary; raises NoMemory


class FrozenState:
    """Snapshot of one state, read piece by piece. `specs` are sorted by name, and tensors are read in that order."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        changes: Changes | None = None,
        make_room: MakeRoom | None = None,
        room: MappedRoom | None = None,
    ) -> None:
        """`changes` reports each change of the live tensors; None if they never change. `make_room` allocates
        memory for a copy, in the thread that changes the tensors; by default the copy is in ordinary memory. `room` is
        the mapped memory in which tensors that never change are stored.
        """
        self.specs = [TensorSpec(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in sorted(state.items())]
        self._tensors: list[Tensor | None] = [tensor.detach() for _, tensor in sorted(state.items())]
        self._live = changes is not None
        self._make_room = make_room
        self._room = room  # of the tensors or their copies, if not in ordinary memory
        self._lacks_room: str | None = None  # why the unread tensors were not copied
        self._is_given_up = False
        self._at = 0  # index of the tensor being read; earlier ones are done
        self._lock = threading.Lock()
        if changes is not None:
            changes.announce_to(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    def give_up(self) -> None:
        """Make every later read raise WorkCancelled, because the rest of the state is no longer needed."""
        self._is_given_up = True  # without the lock, which a copy may hold for a long time

    def read(self, tensor: int, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end` of a tensor; tensors must be read in order.

        Raises NoMemory if the rest could not be copied before a change, WorkCancelled after `give_up`.
        """
        with self._lock:
            if self._is_given_up:
                raise WorkCancelled("the rest of the state is no longer needed")
            if self._lacks_room is not None:
                raise NoMemory(f"the part of the state that was unread at the next step was lost: {self._lacks_room}")
            if self._room is not None:
                self._room.used(end - begin)
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
            try:
                self._copy_what_is_left()
            except NoMemory as error:
                self._lacks_room, self._tensors = str(error), []
            except (MemoryError, RuntimeError):  # torch has no type of its own for a CPU out of memory
                self._lacks_room, self._tensors = "there was no memory for a copy", []

    def _copy_what_is_left(self) -> None:
        left = range(self._at, len(self._tensors))
        room = self._room = self._make_room(sum(self.specs[i].nbytes for i in left)) if self._make_room else None
        begin = 0
        for index in left:
            found = self._tensors[index]
            assert found is not None
            if room is None:
                self._tensors[index] = found.to("cpu", copy=True)
            else:
                end = begin + found.nbytes
                self._tensors[index] = _copied(found, room.row[begin:end], room)
                begin = end


def _copied(tensor: Tensor, row: memoryview, room: MappedRoom) -> Tensor:
    """Copy the bytes of a tensor to `row`, a part of `room`; returns them as a flat uint8 tensor."""
    if not row:
        return torch.empty(0, dtype=torch.uint8)
    source, copy = tensor.reshape(-1).view(torch.uint8), torch.frombuffer(row, dtype=torch.uint8)
    for begin in range(0, len(row), PIECE_BYTES):
        piece = slice(begin, begin + PIECE_BYTES)
        copy[piece] = source[piece]
        room.used(len(row[piece]))
    return copy


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
