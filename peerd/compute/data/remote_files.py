"""Files under an http(s) address: listed by an index, fetched whole when opened, kept in a bounded folder.

A file is kept under its SHA-256, so that runs and processes of one user share it, and nothing that a server says can
name a path on this machine. What was used longest ago makes room. Several processes may use the folder at once: a
file appears whole or not at all, and one that another process took away is fetched again. A file that is open stays
readable when it is taken away (where the system does not allow that, it is not taken away).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, Literal
from urllib.parse import quote, urljoin

from peerd.compute.data.http_fetch import Downloader, Wanted
from peerd.compute.file_index import INDEX_NAME, IndexedFile, parse_index
from peerd.core.errors import ConfigError
from peerd.core.limits import INDEX_BYTES
from peerd.core.run.runfile import SourceSection

CACHE_BYTES: Final = 10 << 30
ABANDONED_S: Final = 3600.0  # a half-fetched file that nobody wrote to for so long has no owner any more
_TRIES: Final = 5  # to open what other processes may take away


def is_remote(path: str) -> bool:
    """True when `data.path` is an http(s) address."""
    return path.startswith(("http://", "https://"))


def default_folder() -> Path:
    """This platform's folder for files that programs can fetch again."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "peerd" / "cache"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches" / "peerd"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peerd"
    return base / "data"


@dataclass(frozen=True, slots=True)
class Cache:
    """A folder for fetched files of at most `most_bytes` together."""

    folder: Path
    most_bytes: int = CACHE_BYTES
    downloader: Downloader = field(default_factory=Downloader)

    def open(self, url: str, file: IndexedFile, key: str) -> BinaryIO:
        """The file, fetched if it is not here; ConfigError or DataUnavailable when that is not possible."""
        if file.bytes > self.most_bytes:
            raise ConfigError(f"{key}.path: {url} has {file.bytes} bytes, the cache {self.folder} {self.most_bytes}")
        path = self.folder / file.sha256
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                stream = path.open("rb")
                if os.fstat(stream.fileno()).st_size == file.bytes:
                    _touch(path)
                    return stream
                stream.close()  # a disk that was full, or somebody's hand
            self._fetch(url, file, path)
        raise ConfigError(f"{path}: is taken away as soon as it is there; the cache is too small for its users")

    def _fetch(self, url: str, file: IndexedFile, path: Path) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(file.bytes)
            part = tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{self.folder}: cannot be written: {error.strerror or error}") from error
        try:
            with part:
                wanted = Wanted(most=file.bytes, size=file.bytes, sha256=file.sha256)
                self.downloader.fetch(url, wanted, part.file)
            os.replace(part.name, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part.name)

    def _make_room(self, wanted_bytes: int) -> None:
        """Take away what was used longest ago until `wanted_bytes` more fit, and what was abandoned."""
        kept = sorted(self._kept())
        total = sum(size for _, size, _ in kept) + wanted_bytes
        for _, size, path in kept:
            if total <= self.most_bytes:
                return
            with contextlib.suppress(OSError):  # gone already, or open where that forbids it
                path.unlink()
                total -= size

    def _kept(self) -> Iterator[tuple[int, int, Path]]:
        """Time of the last use (ns), size in bytes, and path of each file."""
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                if re.fullmatch("[0-9a-f]{64}", path.name):
                    yield found.st_mtime_ns, found.st_size, path
                elif path.suffix == ".part" and time.time() - found.st_mtime > ABANDONED_S:
                    path.unlink()


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of an index; behaves as far as readers need like a Path."""

    url: str
    indexed: IndexedFile
    key: str  # of the source in the run file, for messages
    cache: Cache

    @property
    def name(self) -> str:
        return self.indexed.name.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def open(self, mode: Literal["rb"] = "rb") -> BinaryIO:
        return self.cache.open(self.url, self.indexed, self.key)


def remote_files(source: SourceSection, key: str, cache: Cache) -> dict[str, RemoteFile]:
    """Every file of the index under `source.path`, by name; ConfigError or DataUnavailable when it cannot be had."""
    base = source.path if source.path.endswith("/") else f"{source.path}/"
    url, raw = urljoin(base, INDEX_NAME), io.BytesIO()
    try:
        cache.downloader.fetch(url, Wanted(most=INDEX_BYTES, sha256=source.digest, told_by=f"{key}.digest"), raw)
        files = parse_index(raw.getvalue(), url)
    except ConfigError as error:
        raise ConfigError(f"{key}.path: {error}") from error
    if not files:
        raise ConfigError(f"{key}.path {source.path}: the index has no files")
    return {file.name: RemoteFile(urljoin(base, quote(file.name)), file, key, cache) for file in files}


def _touch(path: Path) -> None:
    now_ns = time.time_ns()  # finer than what the file system would write by itself
    with contextlib.suppress(OSError):
        os.utime(path, ns=(now_ns, now_ns))
