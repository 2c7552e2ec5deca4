"""Checkpoints of experts on disk, one file each: its signed pointer, the digests of its pieces, then its bytes.

Synchronous: for jobs of a worker. A file is written beside its name, synced and renamed, so it is there whole or not
at all; what a crash left half written is removed by `open`. Room is taken before the first byte, so that a full disk
is an OSError at the start. What is read is checked by its digests, for disks rot: ValueError names the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from peerd.core.errors import ProtocolViolation
from peerd.core.limits import STATE_PIECE_BYTES
from peerd.core.messages.encoding import decode, encode
from peerd.core.messages.experts import DIGEST_BYTES, Pointer, state_root
from peerd.core.messages.state import piece_digest

_MAGIC: Final = b"peerd expert 1\n\0"
_HEAD: Final = struct.Struct(f"<{len(_MAGIC)}sI")  # magic, length of the pointer
_POINTER_BYTES: Final = 1024  # some 450 in fact
SUFFIX: Final = ".expert"  # of a checkpoint's file

Bytes = bytes | bytearray | memoryview


def pieces_of(size_bytes: int) -> int:
    """Number of pieces of a checkpoint of this size."""
    return -(-size_bytes // STATE_PIECE_BYTES)


def piece_at(size_bytes: int, number: int) -> tuple[int, int]:
    """Where a piece begins and ends."""
    begin = number * STATE_PIECE_BYTES
    return begin, min(begin + STATE_PIECE_BYTES, size_bytes)


def digests_of(data: Bytes) -> list[bytes]:
    """The digests of a checkpoint's pieces, in order."""
    view = memoryview(data)
    return [piece_digest(view[slice(*piece_at(len(view), number))]) for number in range(pieces_of(len(view)))]


class VaultFile:
    """A checkpoint that is being written; `finish` makes it one that is there, `abandon` leaves nothing."""

    def __init__(self, path: Path, pointer: Pointer, digests: Sequence[bytes]) -> None:
        self._path, self._aside = path, path.with_name(path.name + ".new")
        told = encode(pointer)
        head = _HEAD.pack(_MAGIC, len(told)) + told + b"".join(digests)
        self._begin, self._size = len(head), pointer.size_bytes
        self._file: BinaryIO = self._aside.open("wb")
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, self._begin + self._size)
            self._file.write(head)
        except OSError:
            self.abandon()
            raise

    def write(self, number: int, data: Bytes) -> None:
        """Write a piece that was checked."""
        self._file.seek(self._begin + piece_at(self._size, number)[0])
        self._file.write(data)

    def finish(self) -> None:
        """Make it last."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._aside, self._path)
        if os.name != "nt":
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def abandon(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._aside.unlink(missing_ok=True)


class VaultDisk:
    """The folder of one run's checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> list[Pointer]:
        """The checkpoints that are there; what is half written or damaged goes. OSError when the folder is not usable.

        Looks at heads and sizes alone: bytes are checked when they are read.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        found = self.listed()
        kept = {self._path(pointer) for pointer in found}
        for path in self.folder.iterdir():
            if path.name.endswith((SUFFIX, SUFFIX + ".new")) and path not in kept:
                path.unlink(missing_ok=True)
        return found

    def listed(self) -> list[Pointer]:
        """The checkpoints that look whole; changes nothing, so that the folder may be another process's."""
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))  # none where there is no such folder
        return [pointer for path in paths if (pointer := self._whole(path)) is not None]

    def _whole(self, path: Path) -> Pointer | None:
        """The pointer of a file that has the size and the name that go with it."""
        try:
            pointer, begin = _head(path)
            whole = path.stat().st_size == begin + pointer.size_bytes and path == self._path(pointer)
        except (ValueError, FileNotFoundError):  # not found: its process has just removed it
            return None
        return pointer if whole else None

    def free_bytes(self) -> int:
        """Free room of the file system."""
        return shutil.disk_usage(self.folder).free

    def begin(self, pointer: Pointer, digests: Sequence[bytes]) -> VaultFile:
        """A file for a checkpoint whose digests are right; OSError where there is no room."""
        return VaultFile(self._path(pointer), pointer, digests)

    def write(self, pointer: Pointer, digests: Sequence[bytes], data: Bytes) -> None:
        """Write a whole checkpoint."""
        file = self.begin(pointer, digests)
        try:
            for number in range(len(digests)):
                file.write(number, memoryview(data)[slice(*piece_at(len(data), number))])
            file.finish()
        except OSError:
            file.abandon()
            raise

    def digests(self, pointer: Pointer) -> bytes:
        """The digests of all pieces, joined."""
        path = self._path(pointer)
        with path.open("rb") as file:
            return self._digests(file, path, pointer)

    def piece(self, pointer: Pointer, number: int) -> bytes:
        """One piece, checked by the digest that stands for it in the file."""
        path = self._path(pointer)
        _, begin = _head(path)
        start, end = piece_at(pointer.size_bytes, number)
        with path.open("rb") as file:
            file.seek(begin - DIGEST_BYTES * (pieces_of(pointer.size_bytes) - number))
            digest = file.read(DIGEST_BYTES)
            file.seek(begin + start)
            data = file.read(end - start)
        if piece_digest(data) != digest:
            raise ValueError(f"{path} is damaged: its bytes are not those of its digests")
        return data

    def read(self, pointer: Pointer) -> bytes:
        """The whole checkpoint, checked."""
        path = self._path(pointer)
        with path.open("rb") as file:
            digests = self._digests(file, path, pointer)
            data = file.read(pointer.size_bytes)
        whole = hashlib.sha256(b"".join(digests_of(data))).digest() == state_root([digests])
        if len(data) != pointer.size_bytes or not whole:
            raise ValueError(f"{path} is damaged: its bytes are not those of its digests")
        return data

    def remove(self, pointer: Pointer) -> None:
        """Delete a checkpoint, if it is there."""
        self._path(pointer).unlink(missing_ok=True)

    def _digests(self, file: BinaryIO, path: Path, pointer: Pointer) -> bytes:
        file.seek(_head(path)[1] - DIGEST_BYTES * pieces_of(pointer.size_bytes))
        digests = file.read(DIGEST_BYTES * pieces_of(pointer.size_bytes))
        if state_root([digests]) != pointer.digest:
            raise ValueError(f"{path} is damaged: its digests are not those of its pointer")
        return digests

    def _path(self, pointer: Pointer) -> Path:
        names = pointer.digest.hex()[:16], hashlib.sha256(pointer.signature).hexdigest()[:16]
        return self.folder / f"{pointer.expert.uid}.{'.'.join(names)}{SUFFIX}"


def _head(path: Path) -> tuple[Pointer, int]:
    """The pointer of a file, and where its bytes begin; ValueError when it is damaged."""
    with path.open("rb") as file:
        try:
            magic, length = _HEAD.unpack(file.read(_HEAD.size))
            if magic != _MAGIC or length > _POINTER_BYTES:
                raise ValueError(f"{path} is not a checkpoint of an expert")
            pointer = decode(Pointer, file.read(length))
        except (struct.error, ProtocolViolation) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    return pointer, _HEAD.size + length + DIGEST_BYTES * pieces_of(pointer.size_bytes)
