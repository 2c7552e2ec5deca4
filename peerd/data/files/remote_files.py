"""Files under an http(s) address: listed by an index, fetched when opened or shortly before, cached in a bounded
folder.

A file is stored under its SHA-256, so that all runs and processes of a user share it, and a server cannot choose a path
on this machine. The least recently used files are deleted first. Several processes may use the folder at once: a file
appears only when complete, and is fetched again if another process deleted it. An open file stays readable after its
deletion (on systems that do not allow this, it is not deleted).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Literal
from urllib.parse import quote, urljoin

from peerd.core.errors import ConfigError
from peerd.core.limits import INDEX_BYTES
from peerd.data.files.file_fetch import STREAMS, CheckedPieces, FetchEnded, FileFetch
from peerd.data.files.file_index import INDEX_NAME, IndexedFile, parse_index
from peerd.data.files.http_fetch import ExpectedContent, HttpFetcher
from peerd.run.runfile import SourceSection

CACHE_BYTES: Final = 10 << 30
ABANDONED_S: Final = 3600.0  # a partial file without writes for that long is abandoned
_LAST_BYTES_S: Final = 5.0  # wait for an ended fetch, until its server sends something
_TRIES: Final = 5  # attempts to open a file that other processes may delete


def is_remote(path: str) -> bool:
    """True if `data.path` is an http(s) address."""
    return path.startswith(("http://", "https://"))


def default_folder() -> Path:
    """This platform's cache folder."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "peerd" / "cache"
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches" / "peerd"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peerd"
    return base / "data"


class RemoteFileCache:
    """A folder of fetched files, at most `most_bytes` in total. Threads may share it."""

    def __init__(self, folder: Path, most_bytes: int = CACHE_BYTES, downloader: HttpFetcher | None = None) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self.downloader = downloader or HttpFetcher()
        self._fetches: dict[str, FileFetch] = {}  # by SHA-256
        self._changed = threading.Condition()  # of all fetches
        self._read: dict[tuple[str, int], str] = {}  # (key of a source, thread) -> SHA-256 of the last opened file
        self._choosing = threading.Lock()  # held while fetches start and end, at most _LAST_BYTES_S

    def open(self, url: str, file: IndexedFile, key: str) -> BinaryIO:
        """Open a file, fetching it if it is missing; raises ConfigError or DataUnavailable if that fails.

        It can be read once its first piece is available; a read waits for missing bytes.
        """
        self._check_size(url, file, key)
        self._read[key, threading.get_ident()] = file.sha256
        path = self.folder / file.sha256
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                stream = path.open("rb")
                if os.fstat(stream.fileno()).st_size == file.bytes:
                    _touch(path)
                    return stream
                stream.close()  # truncated by a full disk, or changed by someone
            with contextlib.suppress(FileNotFoundError, FetchEnded):
                with self._choosing:
                    fetch = self._fetch(url, file)
                if STREAMS and file.pieces:
                    return fetch.open()
                fetch.wait()  # without piece digests, it is checked only when complete
        raise ConfigError(f"{path}: was deleted by another process each time; the cache is too small for its users")

    def fetch_ahead(self, url: str, file: IndexedFile) -> None:
        """Start to fetch a file that will be read next, if the cache has space beside the files being read.

        At most one such fetch exists; it runs after fetches that readers wait for. A failed one is retried, and
        reported, when the file is opened.
        """
        with self._choosing:
            self._clear()
            ahead = any(fetch.is_ahead for fetch in self._fetches.values())
            if not ahead and file.sha256 not in self._fetches and not (self.folder / file.sha256).exists():
                self._start(url, file, is_ahead=True)

    def close(self) -> None:
        """End all fetches."""
        for fetch in self._fetches.values():
            fetch.end()

    def _check_size(self, url: str, file: IndexedFile, key: str) -> None:
        if file.bytes > self.most_bytes:
            raise ConfigError(
                f"{key}.path: {url} has {file.bytes} bytes; the cache {self.folder} may hold {self.most_bytes}"
            )

    def _fetch(self, url: str, file: IndexedFile) -> FileFetch:
        """The fetch of a file that a reader needs: a running one or a new one."""
        self._clear()
        fetch = self._fetches.get(file.sha256)
        if fetch is not None:
            fetch.is_ahead = False
            return fetch
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._room_for(file.bytes, self._others(None)):
                self._end_those_ahead()
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        return self._start(url, file, is_ahead=False)

    def _start(self, url: str, file: IndexedFile, *, is_ahead: bool) -> FileFetch:
        others = self._others(None)
        fetch = self._fetches[file.sha256] = FileFetch(file.bytes, self._changed, is_ahead=is_ahead)
        if is_ahead:
            fetch.start(lambda fetch: self._run_ahead(url, file, fetch, others))
        else:
            fetch.start(lambda fetch: self._run(url, file, fetch))
        return fetch

    def _run_ahead(self, url: str, file: IndexedFile, fetch: FileFetch, others: list[FileFetch]) -> None:
        """Body of a thread that fetches a file ahead: first waits for the fetches `others`."""
        for other in others:
            other.wait_over(unless=fetch)
            fetch.checked(0)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fits = self._room_for(file.bytes, self._others(fetch), set(self._read.values()))
        except OSError as error:
            raise FetchEnded from error
        if fetch.is_ahead and not fits:
            raise FetchEnded
        self._run(url, file, fetch)

    def _others(self, mine: FileFetch | None) -> list[FileFetch]:
        return [fetch for fetch in list(self._fetches.values()) if fetch is not mine and not fetch.is_over]

    def _run(self, url: str, file: IndexedFile, fetch: FileFetch) -> None:
        """Body of a thread that fetches a file into the cache."""
        try:
            part = tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False)  # noqa: SIM115
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        try:
            with part:
                fetch.writes(Path(part.name))
                wanted = ExpectedContent(most=file.bytes, size=file.bytes, sha256=file.sha256)
                self.downloader.fetch(url, wanted, CheckedPieces(part.file, file, url, fetch.checked))
            fetch.moves(self.folder / file.sha256)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part.name)

    def _clear(self) -> None:
        """Forget fetches that are over."""
        self._fetches = {digest: fetch for digest, fetch in self._fetches.items() if not fetch.is_over}

    def _end_those_ahead(self) -> None:
        """End fetches ahead, to free their space in the cache; does not wait long for a server that sends nothing."""
        ended = {digest: fetch for digest, fetch in self._fetches.items() if fetch.is_ahead}
        for fetch in ended.values():
            fetch.end()
            fetch.wait_over(_LAST_BYTES_S)
        self._fetches = {digest: fetch for digest, fetch in self._fetches.items() if digest not in ended}
        self._clear()

    def _room_for(self, wanted_bytes: int, beside: Iterable[FileFetch], spared: Collection[str] = ()) -> bool:
        """Delete least recently used files, except `spared`, until `wanted_bytes` more fit `beside` the other fetches.

        Also deletes abandoned files. Returns False if the bytes do not fit.
        """
        kept = sorted(self._kept())
        total = sum(size for _, size, _ in kept) + wanted_bytes + sum(fetch.size for fetch in beside)
        removable = [(size, path) for _, size, path in kept if path.name not in spared]
        if total - sum(size for size, _ in removable) > self.most_bytes and spared:
            return False
        for size, path in removable:
            if total <= self.most_bytes:
                break
            with contextlib.suppress(OSError):  # already deleted, or open on a system that then forbids it
                path.unlink()
                total -= size
        return total <= self.most_bytes

    def _kept(self) -> Iterator[tuple[int, int, Path]]:
        """Time of the last use (ns), size in bytes, and path of each file."""
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                if re.fullmatch("[0-9a-f]{64}", path.name):
                    yield found.st_mtime_ns, found.st_size, path
                elif path.suffix == ".part" and time.time() - found.st_mtime > ABANDONED_S:
                    path.unlink()


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{folder}: cannot be written: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of an index, with the methods of a Path that readers need."""

    url: str
    indexed: IndexedFile
    key: str  # of the source in the run file, for messages
    cache: RemoteFileCache

    @property
    def name(self) -> str:
        return self.indexed.name.rpartition("/")[2]

    def __str__(self) -> str:
        return self.url

    def open(self, mode: Literal["rb"] = "rb") -> BinaryIO:
        return self.cache.open(self.url, self.indexed, self.key)

    def fetch_ahead(self) -> None:
        """Start to fetch this file, which will be read next."""
        self.cache.fetch_ahead(self.url, self.indexed)


def remote_files(source: SourceSection, key: str, cache: RemoteFileCache) -> dict[str, RemoteFile]:
    """All files of the index under `source.path`, by name; raises ConfigError or DataUnavailable if it cannot be
    fetched.
    """
    base = source.path if source.path.endswith("/") else f"{source.path}/"
    url, raw = urljoin(base, INDEX_NAME), io.BytesIO()
    try:
        cache.downloader.fetch(
            url, ExpectedContent(most=INDEX_BYTES, sha256=source.digest, told_by=f"{key}.digest"), raw
        )
        files = parse_index(raw.getvalue(), url)
    except ConfigError as error:
        raise ConfigError(f"{key}.path: {error}") from error
    if not files:
        raise ConfigError(f"{key}.path {source.path}: the index has no files")
    return {file.name: RemoteFile(urljoin(base, quote(file.name)), file, key, cache) for file in files}


def _touch(path: Path) -> None:
    now_ns = time.time_ns()  # finer resolution than the file system's own timestamps
    with contextlib.suppress(OSError):
        os.utime(path, ns=(now_ns, now_ns))
