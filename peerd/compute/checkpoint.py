"""Checkpoints of one stage on disk: each is a safetensors file and a JSON manifest that names it and its SHA-256.

A checkpoint exists from the moment its manifest does: the tensors are written under a name of their own and synced,
then the manifest is written aside, synced, and renamed into place. So a crash at any moment leaves the checkpoints
that were there, and files without a manifest, which the next `clean` removes. Loading checks size, digest, run and
stage before a tensor is used; what is wrong is a ConfigError that names the file. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import safetensors
import safetensors.torch
from torch import Tensor

from peerd.compute.frozen_state import FrozenState, write_state
from peerd.core.decoders import from_json
from peerd.core.errors import ConfigError
from peerd.core.limits import LAST_STEP

FORMAT: Final = 1
_UNKNOWN_DIGEST: Final = "0" * 16  # in the name of a file that is being written
_MANIFEST: Final = re.compile(r"step-(\d{8,})\.json")
_TENSORS: Final = re.compile(r"step-(\d{8,})\.[0-9a-f]{16}\.safetensors")
_WRITTEN: Final = re.compile(r"step-(\d{8,})\.([0-9a-f]{16}\.safetensors(\.new)?|json\.new)")
_SYSTEM_SAYS: Final = re.compile(r'(?:message: "|I/O error: )([^"(]+\w)')  # inside what safetensors says of it


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a checkpoint; `extra` is the caller's own plain data."""

    format: int
    step: int
    stage: int
    fingerprint: str  # of the run, hexadecimal
    tensors: str  # name of the safetensors file beside the manifest
    tensor_bytes: int
    sha256: str  # of that file
    digest: str  # of the state itself, as peers compare it
    extra: dict[str, Any] = {}


class Checkpoints:
    """The checkpoints of one stage of one run in one folder; the newest `keep` stay. Several processes may read."""

    def __init__(self, folder: Path, keep: int, fingerprint: bytes, stage: int, most_bytes: int | None = None) -> None:
        """Touches nothing on disk; `clean` and `save` are for the one process that writes.

        `most_bytes`: for the tensors of all stages of the run, in the folders beside this one; None: no limit.
        """
        self.folder = folder
        self._most_bytes = most_bytes
        self._keep = max(1, keep)
        self._held: set[int] = set()  # steps that stay, and do not count
        self._fingerprint = fingerprint.hex()
        self._stage = stage

    def steps(self) -> list[int]:
        """Steps that are saved, ascending: a listing of the folder, no file is opened."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot be read: {error.strerror}") from error
        return sorted(int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name)))

    def hold(self, step: int) -> None:
        """Never prune the checkpoint of `step`, present or future, while this object lives."""
        self._held.add(step)

    def save(
        self, step: int, state: Mapping[str, Tensor] | FrozenState, extra: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint, replacing one of the same step, and prune; gives the manifest's path. A frozen state is
        read once, piece by piece.
        """
        frozen = state if isinstance(state, FrozenState) else FrozenState(state)
        self._make_room(step, frozen.nbytes)
        with _disk(self.folder, writes=True):
            self.folder.mkdir(parents=True, exist_ok=True)
            aside = self.folder / f"step-{step:08d}.{_UNKNOWN_DIGEST}.safetensors.new"
            with _whole_or_gone(aside):
                digest = write_state(aside, frozen)
                _sync(aside)
                sha256, size = _sha256(aside), aside.stat().st_size
                tensors = self.folder / f"step-{step:08d}.{digest.hex()[:16]}.safetensors"
                os.replace(aside, tensors)
            manifest = Manifest(
                FORMAT,
                step,
                self._stage,
                self._fingerprint,
                tensors.name,
                size,
                sha256,
                digest.hex(),
                dict(extra or {}),
            )
            path = self._manifest_path(step)
            aside = path.with_name(path.name + ".new")
            with _whole_or_gone(aside):
                aside.write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
                _sync(aside)
                os.replace(aside, path)
            _sync(self.folder)
        self._prune(step)
        return path

    def load(self, step: int) -> tuple[dict[str, Tensor], Manifest]:
        """The state and manifest of a step; ConfigError names the file that is missing, damaged or of another run."""
        manifest = self.manifest(step)
        path = self.folder / manifest.tensors
        with _disk(path):
            size, expected = path.stat().st_size, manifest.tensor_bytes
            if size != expected:
                raise ConfigError(f"{path} is damaged: it has {size} bytes, not {expected}; delete {self._hint(step)}")
            if _sha256(path) != manifest.sha256:
                raise ConfigError(f"{path} is damaged: its SHA-256 is not the manifest's; delete {self._hint(step)}")
            try:
                state = safetensors.torch.load_file(path)
            except safetensors.SafetensorError as error:
                raise ConfigError(f"{path} is damaged: {error}; delete {self._hint(step)}") from error
        return state, manifest

    def manifest(self, step: int) -> Manifest:
        """The manifest alone, checked to be of this run and stage."""
        path = self._manifest_path(step)
        found = read_manifest(path, f"delete {self._hint(step)}")
        if found.fingerprint != self._fingerprint:
            raise ConfigError(f"{path} is of another run: fingerprint {found.fingerprint}, not {self._fingerprint}")
        if (found.stage, found.step) != (self._stage, step):
            here = f"stage {self._stage}, step {step}"
            raise ConfigError(f"{path} is of stage {found.stage}, step {found.step}; expected {here}")
        if not _TENSORS.fullmatch(found.tensors):
            raise ConfigError(f"{path} is damaged: it names {found.tensors!r}; delete {self._hint(step)}")
        return found

    def remove(self, step: int) -> None:
        """Forget a checkpoint, if it is there."""
        with _disk(self.folder):
            self._manifest_path(step).unlink(missing_ok=True)
        self._prune()

    def clean(self) -> None:
        """Remove what a crash left behind; call it once at the start, before the first `save`."""
        self._prune()

    def _make_room(self, step: int, nbytes: int) -> None:
        """Remove the oldest checkpoints, except the newest, until `nbytes` more are within the limit; ConfigError where
        that is too few: without the newest a crash while this one is written would leave none.
        """
        if self._most_bytes is None:
            return
        with _disk(self.folder):
            sizes = {file: file.stat().st_size for file in self.folder.parent.glob("stage-*/*.safetensors")}
        total, most = sum(sizes.values()) + nbytes, self._most_bytes
        others = [other for other in self.steps() if other not in self._held and other != step]
        mine = sorted(others, key=lambda other: (other <= step, other))[:-1]  # as `_prune`
        freed = {other: (self.folder / manifest.tensors) for other in mine if (manifest := self._mine(other))}
        if total - sum(sizes.get(file, 0) for file in freed.values()) > most:
            raise ConfigError(
                f"a checkpoint takes {nbytes / 1e9:.2g} GB beside the one before; limits.disk_gb (--disk-gb) allows "
                f"{most / 1e9:g} GB below {self.folder.parent}: allow more, or remove folders of stages that this peer "
                "serves no more"
            )
        for other in mine:
            if total <= most:
                return
            if other in freed:
                total -= sizes.get(freed[other], 0)
                self.remove(other)

    def _prune(self, written: int = LAST_STEP) -> None:
        """Keep the newest checkpoints and the tensors they name; leave alone whatever is not surely ours.

        After `written` later ones go first: a run that went back has left the branch that they are of.
        """
        with _disk(self.folder):
            mine = {step: manifest for step in self.steps() if (manifest := self._mine(step)) is not None}
            for step in sorted(mine.keys() - self._held, key=lambda step: (step <= written, step))[: -self._keep]:
                self._manifest_path(step).unlink(missing_ok=True)
                del mine[step]
            left = set(self.steps())
            for path in sorted(self.folder.iterdir()) if self.folder.exists() else []:
                found = _WRITTEN.fullmatch(path.name)
                if found is None:
                    continue
                step = int(found[1])
                orphan = step not in left or (step in mine and mine[step].tensors != path.name)
                if orphan or path.suffix == ".new":
                    with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows: still mapped by a reader
                        path.unlink()

    def _mine(self, step: int) -> Manifest | None:
        """The manifest of a step, or None when it is not of this run or cannot be read."""
        try:
            return self.manifest(step)
        except ConfigError:
            return None

    def _manifest_path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.json"

    def _hint(self, step: int) -> str:
        """The file to delete so that the run goes on from an earlier checkpoint, in words."""
        earlier = [other for other in self.steps() if other < step]
        then = f"step {earlier[-1]}" if earlier else "the start"
        return f"{self._manifest_path(step).name} to go on from {then}"


def read_manifest(path: Path, advice: str = "") -> Manifest:
    """A manifest of whichever run and stage; ConfigError, with `advice`, when it cannot be read."""
    with _disk(path):
        raw = path.read_bytes()
    try:
        found = from_json(raw, Manifest)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is damaged: {error}{advice and '; '}{advice}") from error
    if found.format != FORMAT:
        raise ConfigError(f"{path} has format {found.format}; this peerd reads format {FORMAT}")
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, survive a power cut. Windows has no such call for folders."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _whole_or_gone(path: Path) -> Iterator[None]:
    """Remove a file that was not written to its end: it takes no room on a disk that has none."""
    with contextlib.ExitStack() as failed:
        failed.callback(_forget, path)
        yield
        failed.pop_all()


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(path: Path, writes: bool = False) -> Iterator[None]:
    """Errors of the file system as ConfigErrors that name the path; of a disk that is written to, also its room."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{error.filename or path}: {error.strerror or error}{_room(path, writes)}") from error
    except safetensors.SafetensorError as error:
        found = _SYSTEM_SAYS.search(str(error))
        raise ConfigError(f"{path}: {found[1] if found else error}{_room(path, writes)}") from error


def _room(path: Path, writes: bool) -> str:
    there = next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
    return f" ({shutil.disk_usage(there).free / 1e6:.1f} MB free)" if writes and there is not None else ""
