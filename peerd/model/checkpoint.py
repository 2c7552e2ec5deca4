"""Checkpoints of one stage on disk: each is a safetensors file, and a JSON manifest with its name and SHA-256.

A checkpoint exists once its manifest does: the tensors are written under a temporary name and synced, then the manifest
is written to a temporary file, synced, and renamed. A crash at any moment therefore leaves the earlier checkpoints, and
files without a manifest, which the next `clean` removes. Loading checks size, digest, run and stage before a tensor is
used; a fault raises ConfigError, which names the file. Nothing is unpickled.
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

from peerd.core.decoders import from_json
from peerd.core.errors import ConfigError
from peerd.core.limits import LAST_STEP
from peerd.model.frozen_state import FrozenState, write_state
from peerd.run.home import sync

FORMAT: Final = 1
_UNKNOWN_DIGEST: Final = "0" * 16  # placeholder in the name of a file that is being written
_MANIFEST: Final = re.compile(r"step-(\d{8,})\.json")
_TENSORS: Final = re.compile(r"step-(\d{8,})\.[0-9a-f]{16}\.safetensors")
_WRITTEN: Final = re.compile(r"step-(\d{8,})\.([0-9a-f]{16}\.safetensors(\.new)?|json\.new)")
_SYSTEM_SAYS: Final = re.compile(r'(?:message: "|I/O error: )([^"(]+\w)')  # the system's message in safetensors'


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a checkpoint; `extra` is the caller's own plain data."""

    format: int
    step: int
    stage: int
    fingerprint: str  # of the run, in hexadecimal
    tensors: str  # name of the safetensors file beside the manifest
    tensor_bytes: int
    sha256: str  # of that file
    digest: str  # of the state itself, which peers compare
    extra: dict[str, Any] = {}


class Checkpoints:
    """The checkpoints of one stage of one run in one folder. Keeps the newest `keep`. Several processes may read."""

    def __init__(self, folder: Path, keep: int, fingerprint: bytes, stage: int, most_bytes: int | None = None) -> None:
        """Does not touch the disk. Only the one process that writes may call `clean` and `save`.

        `most_bytes`: limit for the tensors of all stages of the run, in the folders beside this one, or None for no
        limit.
        """
        self.folder = folder
        self._most_bytes = most_bytes
        self._keep = max(1, keep)
        self._held: set[int] = set()  # steps that are never pruned, and not counted
        self._fingerprint = fingerprint.hex()
        self._stage = stage

    def steps(self) -> list[int]:
        """The saved steps, ascending. Lists the folder without opening a file."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot be read: {error.strerror}") from error
        return sorted(int(match[1]) for name in names if (match := _MANIFEST.fullmatch(name)))

    def hold(self, step: int) -> None:
        """Never prune the checkpoint of `step`, present or future, while this object exists."""
        self._held.add(step)

    def save(
        self, step: int, state: Mapping[str, Tensor] | FrozenState, extra: Mapping[str, Any] | None = None
    ) -> Path:
        """Write a checkpoint, replacing one of the same step, and prune; returns the manifest's path.

        A frozen state is read once, piece by piece.
        """
        frozen = state if isinstance(state, FrozenState) else FrozenState(state)
        self._make_room(step, frozen.nbytes)
        with _disk(self.folder, writes=True):
            self.folder.mkdir(parents=True, exist_ok=True)
            aside = self.folder / f"step-{step:08d}.{_UNKNOWN_DIGEST}.safetensors.new"
            with _whole_or_gone(aside):
                digest = write_state(aside, frozen)
                sync(aside)
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
                sync(aside)
                os.replace(aside, path)
            sync(self.folder)
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
        """The manifest of a step, after checking that it belongs to this run and stage."""
        path = self._manifest_path(step)
        found = read_manifest(path, f"delete {self._hint(step)}")
        if found.fingerprint != self._fingerprint:
            raise ConfigError(f"{path} is of another run: fingerprint {found.fingerprint}, not {self._fingerprint}")
        if (found.stage, found.step) != (self._stage, step):
            here = f"stage {self._stage}, step {step}"
            raise ConfigError(f"{path} is of stage {found.stage}, step {found.step}; expected {here}")
        if not _TENSORS.fullmatch(found.tensors):
            raise ConfigError(f"{path} is damaged: it names the file {found.tensors!r}; delete {self._hint(step)}")
        return found

    def remove(self, step: int) -> None:
        """Delete a checkpoint, if it exists."""
        with _disk(self.folder):
            self._manifest_path(step).unlink(missing_ok=True)
        self._prune()

    def clean(self) -> None:
        """Delete leftovers of a crash; call it once at the start, before the first `save`."""
        self._prune()

    def _make_room(self, step: int, nbytes: int) -> None:
        """Delete the oldest checkpoints, except the newest, until `nbytes` more are within the limit.

        Raises ConfigError if that is not enough: without the newest one, a crash during the next write would leave
        none.
        """
        if self._most_bytes is None:
            return
        with _disk(self.folder):
            sizes = {file: file.stat().st_size for file in self.folder.parent.glob("stage-*/*.safetensors")}
        total, most = sum(sizes.values()) + nbytes, self._most_bytes
        others = [other for other in self.steps() if other not in self._held and other != step]
        mine = sorted(others, key=lambda other: (other <= step, other))[:-1]  # in the order of `_prune`
        freed = {other: (self.folder / manifest.tensors) for other in mine if (manifest := self._mine(other))}
        if total - sum(sizes.get(file, 0) for file in freed.values()) > most:
            raise ConfigError(
                f"a checkpoint takes {nbytes / 1e9:.2g} GB beside the previous one; limits.disk_gb (--disk-gb) allows "
                f"{most / 1e9:g} GB below {self.folder.parent}: allow more, or delete folders of stages that this peer "
                "no longer serves"
            )
        for other in mine:
            if total <= most:
                return
            if other in freed:
                total -= sizes.get(freed[other], 0)
                self.remove(other)

    def _prune(self, written: int = LAST_STEP) -> None:
        """Delete all but the newest checkpoints and the tensors that they name. Leaves checkpoints of other runs alone.

        Steps after `written` are deleted first: a run that went back has abandoned their branch.
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
        """The manifest of a step, or None if it is of another run or cannot be read."""
        try:
            return self.manifest(step)
        except ConfigError:
            return None

    def _manifest_path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.json"

    def _hint(self, step: int) -> str:
        """Text that names the file to delete, so that the run continues from an earlier checkpoint."""
        earlier = [other for other in self.steps() if other < step]
        then = f"step {earlier[-1]}" if earlier else "the start"
        return f"{self._manifest_path(step).name} to go on from {then}"


def read_manifest(path: Path, advice: str = "") -> Manifest:
    """Read a manifest of any run and stage; raises ConfigError, with `advice`, if it cannot be read."""
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


@contextlib.contextmanager
def _whole_or_gone(path: Path) -> Iterator[None]:
    """Delete the file if it could not be written completely, so that it takes no space on a full disk."""
    with contextlib.ExitStack() as failed:
        failed.callback(_forget, path)
        yield
        failed.pop_all()


def _forget(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(path: Path, writes: bool = False) -> Iterator[None]:
    """Convert file system errors into ConfigErrors that name the path and, if `writes`, the free space."""
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
