"""Which files a run reads, and which part of them is held out for validation.

With many files, whole files are held out by the hash of their name: the same on every peer, whatever the order and
the folder. With few, the last part of every file is. Nothing here remembers a position; readers.py reads.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from peerd.compute.readers import Cursor, Piece, read_jsonl, read_parquet, read_text
from peerd.core.errors import ConfigError
from peerd.core.runfile import DataSection

Split = Literal["train", "valid"]

FEW_FILES: Final = 50  # below that, a choice of whole files would be far from the share asked for
_NOT_LIBRARY: Final = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class Corpus:
    """The files of `data.path` that belong to one split, sorted by name."""

    def __init__(self, section: DataSection, split: Split) -> None:
        """ConfigError when nothing matches, or nothing is left for this split."""
        self._section = section
        self._split = split
        if split == "valid" and section.holdout == 0:
            raise ConfigError("data.holdout is 0: there is no text to validate on")
        files = find_files(section)
        self._whole_files = len(files) >= FEW_FILES
        if self._whole_files:
            files = {n: path for n, path in files.items() if (_share(n) < section.holdout) == (split == "valid")}
        if not files:
            raise ConfigError(f"data.holdout {section.holdout} leaves no file of {section.path} for {split} data")
        self.files = [files[name] for name in sorted(files)]

    def read(self, file: Path, cursor: Cursor | None = None) -> Iterator[Piece]:
        """Pieces of one file from `cursor`, or from the start of this split's part of it."""
        kind, field = self._section.kind, self._section.field
        try:
            if kind == "text":
                yield from read_text(file, self._part, cursor)
            elif kind == "jsonl":
                yield from read_jsonl(file, self._part, cursor, field)
            else:
                yield from read_parquet(file, self._part, cursor, field)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error

    def _part(self, size: int) -> tuple[int, int]:
        """Where this split's part of a file of `size` bytes or rows starts and ends."""
        if self._whole_files:
            return 0, size
        cut = size - int(size * self._section.holdout)
        return (0, cut) if self._split == "train" else (cut, size)


def find_files(section: DataSection) -> dict[str, Path]:
    """Every file of `data.path` by its name below the folder that all share; ConfigError when there is none.

    `data.path` may be "stdlib", a file, a folder (all files below it), a glob (`**` goes into folders), or several
    globs between commas.
    """
    if section.path == "stdlib":
        found = _standard_library()
    else:
        patterns = [section.path] if os.path.exists(section.path) else section.path.split(",")
        found = sorted({file for pattern in patterns for file in _matches(pattern.strip())})
    if not found:
        raise ConfigError(f"data.path {section.path}: no file matches (looked from {Path.cwd()})")
    base = os.path.commonpath([file.parent for file in found])
    return {file.relative_to(base).as_posix(): file for file in found}


def _matches(pattern: str) -> Iterator[Path]:
    pattern = os.path.expanduser(pattern)
    if os.path.isdir(pattern):
        pattern = os.path.join(glob.escape(pattern), "**", "*")
    for name in glob.iglob(pattern, recursive=True):
        if os.path.isfile(name):
            yield Path(name).resolve()


def _standard_library() -> list[Path]:
    """Python's own sources: real text that every machine has. Tests are left out, and what was installed later."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def _share(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:6], "big") / (1 << 48)
