"""Checkpoints of experts on disk, one file each: its signed pointer, the digests of its pieces, then its bytes.

Synchronous: for jobs of a worker. A file is written under a temporary name, synced and renamed, so it exists completely
or not at all; `open` removes files that a crash left incomplete. Space is allocated before the first byte, so that a
full disk is an OSError at the start. Reads are checked against the digests, because disks may corrupt data: ValueError
names the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import struct
from pathlib import Path
from typing import BinaryIO, Final

from peerd.core.errors import ProtocolViolation
from peerd.messages.encoding import decode, encode
from peerd.messages.experts import CheckpointRef, state_root
from peerd.messages.state import DIGEST_BYTES, Bytes, Pieces, piece_digest
from peerd.run.home import sync

_MAGIC: Final = b"peerd expert 1\n\0"
_HEAD: Final = struct.Struct(f"<{len(_MAGIC)}sI")  # magic, length of the pointer
_POINTER_BYTES: Final = 1024  # about 450 in practice
SUFFIX: Final = ".expert"  # of checkpoint files


def digests_of(data: Bytes) -> bytes:
    """The digests of a checkpoint's pieces, joined."""
    view, pieces = memoryview(data), Pieces(len(data))
    return b"".join(piece_digest(view[slice(*pieces.piece(number))]) for number in range(pieces.pieces))


class VaultFile:
    """A checkpoint being written: first `begin`. `finish` makes it permanent, else `abandon` removes it."""

    def __init__(self, path: Path, pointer: CheckpointRef) -> None:
        self._path, self._aside = path, path.with_name(path.name + ".new")
        self._pieces = Pieces(pointer.size_bytes)
        told = encode(pointer)
        self._head = _HEAD.pack(_MAGIC, len(told)) + told
        self._begin = len(self._head) + DIGEST_BYTES * self._pieces.pieces  # offset of the bytes
        self._file: BinaryIO | None = None

    def begin(self) -> None:
        """Create the file. Raises OSError if there is no space."""
        self._file = self._aside.open("wb")
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._file.fileno(), 0, self._begin + self._pieces.total_bytes)

    def write(self, number: int, data: Bytes) -> None:
        """Write bytes that were checked, from the begin of piece `number`."""
        assert self._file is not None
        self._file.seek(self._begin + self._pieces.piece(number)[0])
        self._file.write(data)

    def finish(self, digests: Bytes) -> None:
        """Write the head, with the digests of all pieces, sync the file and give it its final name."""
        assert self._file is not None
        self._file.seek(0)
        self._file.write(self._head + digests)
        self._file.close()
        sync(self._aside)
        os.replace(self._aside, self._path)
        sync(self._path.parent)

    def abandon(self) -> None:
        """Close and remove the temporary file. Changes nothing after `finish`."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._aside.unlink(missing_ok=True)


class VaultDisk:
    """The folder of one run's expert checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self) -> list[CheckpointRef]:
        """List the checkpoints and remove incomplete or damaged files. Raises OSError if the folder is unusable.

        Checks only heads and sizes; contents are checked when they are read.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        found = self.listed()
        kept = {self._path(pointer) for pointer in found}
        for path in self.folder.iterdir():
            if path.name.endswith((SUFFIX, SUFFIX + ".new")) and path not in kept:
                path.unlink(missing_ok=True)
        return found

    def listed(self) -> list[CheckpointRef]:
        """The checkpoints that look complete. Changes nothing, so another process may use the folder."""
        paths = sorted(self.folder.glob(f"*{SUFFIX}"))  # empty if there is no such folder
        return [pointer for path in paths if (pointer := self._whole(path)) is not None]

    def _whole(self, path: Path) -> CheckpointRef | None:
        """The pointer of a file whose size and name match it, else None."""
        try:
            pointer, begin = _head(path)
            whole = path.stat().st_size == begin + pointer.size_bytes and path == self._path(pointer)
        except (ValueError, FileNotFoundError):  # not found: another process has just removed it
            return None
        return pointer if whole else None

    def free_bytes(self) -> int:
        """Free space of the file system."""
        return shutil.disk_usage(self.folder).free

    def file(self, pointer: CheckpointRef) -> VaultFile:
        """The file to write a checkpoint to."""
        return VaultFile(self._path(pointer), pointer)

    def write(self, pointer: CheckpointRef, digests: Bytes, data: Bytes) -> None:
        """Write a whole checkpoint."""
        file = self.file(pointer)
        try:
            file.begin()
            file.write(0, data)
            file.finish(digests)
        finally:
            file.abandon()

    def digests(self, pointer: CheckpointRef) -> bytes:
        """The digests of all pieces, joined."""
        path = self._path(pointer)
        with path.open("rb") as file:
            return self._digests(file, path, pointer)

    def piece(self, pointer: CheckpointRef, number: int) -> bytes:
        """One piece, checked against its digest in the file."""
        path = self._path(pointer)
        _, begin = _head(path)
        pieces = Pieces(pointer.size_bytes)
        start, end = pieces.piece(number)
        with path.open("rb") as file:
            file.seek(begin - DIGEST_BYTES * (pieces.pieces - number))
            digest = file.read(DIGEST_BYTES)
            file.seek(begin + start)
            data = file.read(end - start)
        if piece_digest(data) != digest:
            raise ValueError(f"{path} is damaged: its bytes are not those of its digests")
        return data

    def read(self, pointer: CheckpointRef) -> bytes:
        """The whole checkpoint, checked."""
        path = self._path(pointer)
        with path.open("rb") as file:
            digests = self._digests(file, path, pointer)
            data = file.read(pointer.size_bytes)
        if len(data) != pointer.size_bytes or digests_of(data) != digests:
            raise ValueError(f"{path} is damaged: its bytes are not those of its digests")
        return data

    def remove(self, pointer: CheckpointRef) -> None:
        """Delete a checkpoint, if it exists."""
        self._path(pointer).unlink(missing_ok=True)

    def _digests(self, file: BinaryIO, path: Path, pointer: CheckpointRef) -> bytes:
        size = DIGEST_BYTES * Pieces(pointer.size_bytes).pieces
        file.seek(_head(path)[1] - size)
        digests = file.read(size)
        if state_root(digests) != pointer.digest:
            raise ValueError(f"{path} is damaged: its digests are not those of its pointer")
        return digests

    def _path(self, pointer: CheckpointRef) -> Path:
        names = pointer.digest.hex()[:16], hashlib.sha256(pointer.signature).hexdigest()[:16]
        return self.folder / f"{pointer.expert.uid}.{'.'.join(names)}{SUFFIX}"


def _head(path: Path) -> tuple[CheckpointRef, int]:
    """The pointer of a file and the offset of its bytes. Raises ValueError if the head is damaged."""
    with path.open("rb") as file:
        try:
            magic, length = _HEAD.unpack(file.read(_HEAD.size))
            if magic != _MAGIC or length > _POINTER_BYTES:
                raise ValueError(f"{path} is not a checkpoint of an expert")
            pointer = decode(CheckpointRef, file.read(length))
        except (struct.error, ProtocolViolation) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
    return pointer, _HEAD.size + length + DIGEST_BYTES * Pieces(pointer.size_bytes).pieces
