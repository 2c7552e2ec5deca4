"""One file that is fetched by a thread of its own, and may be read meanwhile as far as it has been checked.

An index gives the digest of each piece of a file, so that its first samples can be made before its last byte is here,
and none is ever made of bytes that nobody has checked. A piece that arrives damaged is fetched once more, from where it
begins. A file without digests of pieces is one piece. A server that sends everything again after a broken line writes
over nothing that has been checked.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

import outcome

from peerd.compute.data.http_fetch import PassingFault
from peerd.compute.file_index import IndexedFile
from peerd.core.errors import ConfigError

STREAMS: Final = os.name == "posix"  # elsewhere a file that is open cannot be given its name


class FetchEnded(Exception):
    """Nobody wants the file any more."""


class FileFetch:
    """State of one fetch. The thread tells it the file that it writes and how much of it may be read."""

    def __init__(self, size: int, changed: threading.Condition, *, is_ahead: bool) -> None:
        """`changed`: one for all fetches that wait for each other. `is_ahead`: nobody reads the file yet."""
        self.size, self.is_ahead = size, is_ahead
        self._path: Path | None = None
        self._checked = 0
        self._result: outcome.Outcome[None] | None = None
        self._ended = False
        self._changed = changed
        self._thread: threading.Thread | None = None

    def start(self, job: Callable[[FileFetch], None]) -> None:
        """Run `job` in a thread."""

        def run() -> None:
            result = outcome.capture(job, self)
            with self._changed:
                self._result = result
                self._changed.notify_all()

        self._thread = threading.Thread(target=run, name="peerd fetch", daemon=True)
        self._thread.start()

    # --- for the thread -----------------------------------------------------------------------------------------

    def writes(self, path: Path) -> None:
        """The fetch writes to the file `path`."""
        with self._changed:
            self._path = path
            self._changed.notify_all()

    def checked(self, count: int) -> None:
        """The first `count` bytes may be read; FetchEnded if nobody wants them."""
        if self._ended:
            raise FetchEnded
        with self._changed:
            self._checked = max(self._checked, count)
            self._changed.notify_all()

    def moves(self, path: Path) -> None:
        """Give the complete file its name."""
        with self._changed:
            assert self._path is not None
            os.replace(self._path, path)
            self._path = path

    # --- for others ---------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._result is not None

    def end(self) -> None:
        """End the fetch at its next bytes, or at once while it waits for another one."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until it is over; raises what the fetch raised."""
        self.wait_over()
        self._raise()

    def wait_over(self, within_s: float | None = None, unless: FileFetch | None = None) -> None:
        """Wait until it is over, however it ends; or until the fetch `unless`, which waits for it, is to end."""
        with self._changed:
            over = lambda: self._result is not None or (unless is not None and unless._ended)  # noqa: E731
            self._changed.wait_for(over, within_s)

    def wait_beyond(self, at: int) -> int:
        """Wait until more than `at` bytes may be read; returns how many. Raises what the fetch raised before."""
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None or self._checked > at or at >= self.size)
            if self._checked > at or at >= self.size:
                return self._checked
        self._raise()
        return self.size

    def open(self) -> BinaryIO:
        """The file as it grows; FileNotFoundError when it is gone already."""
        with self._changed:
            self._changed.wait_for(lambda: self._path is not None or self._result is not None)
            if self._path is not None and not isinstance(self._result, outcome.Error):
                return io.BufferedReader(GrowingFile(self, self._path.open("rb", buffering=0)), 1 << 16)
        self._raise()
        raise FileNotFoundError

    def _raise(self) -> None:
        if isinstance(self._result, outcome.Error):
            raise self._result.error


class GrowingFile(io.RawIOBase):
    """A file that is being fetched: a read waits until there are bytes that have been checked."""

    def __init__(self, fetch: FileFetch, file: io.FileIO) -> None:
        super().__init__()
        self._fetch, self._file, self._at = fetch, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._fetch.size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` as far as bytes are here; raises what ended the fetch."""
        count = min(len(buffer), max(0, self._fetch.wait_beyond(self._at) - self._at))
        found = os.pread(self._file.fileno(), count, self._at)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        self._file.close()
        super().close()


class CheckedPieces:
    """Takes the bytes of one file in order. For `HttpFetcher.fetch` it is an empty file."""

    def __init__(self, file: IO[bytes], indexed: IndexedFile, url: str, checked: Callable[[int], None]) -> None:
        """`checked` is called with the number of bytes from the begin that are right, each time that it has grown.

        What it raises ends the fetch.
        """
        self._file, self._indexed, self._url, self._checked = file, indexed, url, checked
        self.name = str(file.name)
        self._pieces = indexed.pieces or ([indexed.sha256] if indexed.bytes else [])
        self._piece_bytes = indexed.piece_bytes if indexed.pieces else indexed.bytes
        self._right = 0  # pieces in the file that have been checked
        self._damaged: int | None = None  # the piece that was damaged last
        self.seek(0)

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> int:
        """Begin again: `at` is 0."""
        assert at == 0
        self._at, self._hash = 0, hashlib.sha256()
        return 0

    def truncate(self) -> int:
        """Keep the pieces that were checked."""
        return self._at

    def read(self, count: int) -> bytes:
        """Bytes of a file that is complete, to compare its digest as a whole."""
        self._file.seek(self._at)
        found = self._file.read(count)
        self._at += len(found)
        return found

    def write(self, chunk: bytes) -> int:
        """Take the next bytes; PassingFault for a damaged piece, ConfigError for one that is damaged twice."""
        rest = memoryview(chunk)
        while rest:
            number = self._at // self._piece_bytes
            end = min((number + 1) * self._piece_bytes, self._indexed.bytes)
            part, rest = rest[: end - self._at], rest[end - self._at :]
            if number >= self._right:
                self._file.seek(self._at)
                self._file.write(part)
            self._hash.update(part)
            self._at += len(part)
            if self._at == end:
                self._check(number)
        self._checked(min(self._right * self._piece_bytes, self._indexed.bytes))
        return len(chunk)

    def _check(self, number: int) -> None:
        found, self._hash = self._hash.hexdigest(), hashlib.sha256()
        if found != self._pieces[number]:
            self._at = number * self._piece_bytes
            if self._damaged == number:
                raise ConfigError(self._fault(number))
            self._damaged = number
            raise PassingFault("what arrived has another SHA-256")
        if number >= self._right:
            self._file.flush()
            self._right = number + 1

    def _fault(self, number: int) -> str:
        if len(self._pieces) == 1:
            return f"{self._url}: its SHA-256 is not {self._pieces[0]}, as the index says"
        where = f"{self._piece_bytes} bytes from {self._at} on"
        return f"{self._url}: the SHA-256 of the {where} is not {self._pieces[number]}, as the index says"
