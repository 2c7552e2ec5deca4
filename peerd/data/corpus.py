"""Files of a source, and the part of them that is held out for validation.

Files are on this machine or under an http(s) address (remote_files.py), and are treated alike. With many files, whole
files are held out by the hash of their name: the same ones on every peer, in any order and folder. With few,
the end of every file is held out. Keeps no position; readers.py reads the files.
"""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from peerd.core.errors import ConfigError
from peerd.data.files.remote_files import RemoteFile, RemoteFileCache, default_folder, is_remote, remote_files
from peerd.data.readers import Cursor, Field, TextPiece, read_jsonl, read_parquet, read_text
from peerd.data.skipped_rows import RowFaults, SkippedRows
from peerd.data.text_stream import DataFile, FilePart
from peerd.run.runfile import SourceSection

Split = Literal["train", "valid"]

FEW_FILES: Final = 50  # below that, a choice of whole files would miss the requested share
_NOT_LIBRARY: Final = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class Documents(Protocol):
    """The documents of one split of one source, file by file."""

    files: Sequence[Any]
    skipped: SkippedRows

    def read(self, file: Any, cursor: Cursor | None = None, epoch: int = 0) -> Iterator[TextPiece]:
        """Pieces of one of `files` from `cursor` on; equal arguments give equal pieces."""
        ...

    def fetch_ahead(self, file: Any) -> None:
        """Prepare one of `files`, which will be read next."""
        ...


class Corpus:
    """The files of one source that belong to one split, sorted by name."""

    def __init__(
        self,
        source: SourceSection,
        holdout: float,
        split: Split,
        key: str = "data",
        cache: RemoteFileCache | None = None,
        *,
        strict: bool = False,
    ) -> None:
        """Raises ConfigError, with the path `key` in the run file, if no file matches or none is left for this split.

        `cache`: stores files fetched over http(s); by default the user's common cache. `strict`: a row without text
        raises ConfigError.
        """
        self.skipped = SkippedRows(strict)
        self._source = source
        self._key = key
        self._holdout = holdout
        self._split = split
        if split == "valid" and holdout == 0:
            raise ConfigError("data.holdout is 0: there is no text to validate on")
        files = _list(source, key, cache)
        self._whole_files = len(files) >= FEW_FILES
        if self._whole_files:
            files = {n: file for n, file in files.items() if (_share(n) < holdout) == (split == "valid")}
        if not files:
            raise ConfigError(f"data.holdout {holdout} leaves no file of {source.path} for {split} data")
        self.files: Sequence[DataFile] = [files[name] for name in sorted(files)]

    def read(self, file: DataFile, cursor: Cursor | None = None, epoch: int = 0) -> Iterator[TextPiece]:
        """Pieces of one file from `cursor`, or from the start of this split's part of it; the same in every epoch."""
        kind, field = self._source.kind, Field(self._source.field, f"{self._key}.field")
        faults = RowFaults(self.skipped, cursor is None)
        try:
            if kind == "text":
                yield from read_text(file, self._part(), cursor)
            elif kind == "jsonl":
                yield from read_jsonl(file, self._part(), cursor, field, faults)
            else:
                yield from read_parquet(file, self._part(), cursor, field, faults)
        except OSError as error:
            raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error

    def fetch_ahead(self, file: DataFile) -> None:
        """Start to fetch a file under an http(s) address, which will be read next."""
        if isinstance(file, RemoteFile):
            file.fetch_ahead()

    def _part(self) -> FilePart:
        """This split's part of each file."""
        return FilePart() if self._whole_files else FilePart(self._holdout, self._split == "valid")


def _list(source: SourceSection, key: str, cache: RemoteFileCache | None) -> Mapping[str, DataFile]:
    if not is_remote(source.path):
        return find_files(source.path, key)
    return remote_files(source, key, cache or RemoteFileCache(default_folder()))


def find_files(path: str, key: str = "data") -> dict[str, Path]:
    """All files of `path`, by their names below their common folder; raises ConfigError if there are none.

    `path`: "stdlib", a file, a folder (all files below it), a glob (`**` matches folders), or several globs separated
    by commas.
    """
    if path == "stdlib":
        found = _standard_library()
    else:
        patterns = [path] if os.path.exists(path) else path.split(",")
        found = sorted({file for pattern in patterns for file in _matches(pattern.strip())})
    if not found:
        else_ = f"put text there, or name other files ({key}.path; stdlib: the sources of Python's library)"
        raise ConfigError(f"{key}.path {path}: no file matches (looked from {Path.cwd()}): {else_}")
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
    """Python's own sources: real text that every machine has. Excludes tests and packages installed later."""
    files: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = sorted(set(folders) - _NOT_LIBRARY)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def _share(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:6], "big") / (1 << 48)
