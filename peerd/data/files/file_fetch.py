"""Fetch of one file by a thread of its own; checked bytes may be read while it runs.

An index contains the digest of each piece of a file, so that the first samples can be made before the last byte has
arrived, and never from unchecked bytes. A damaged piece is fetched once more, from its start. A file without piece
digests is a single piece. If a server sends everything again after a lost connection, checked bytes are not
overwritten.
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

from peerd.core.errors import ConfigError
from peerd.data.files.file_index import IndexedFile
from peerd.data.files.http_fetch import TransientError

STREAMS: Final = os.name == "posix"  # other systems cannot rename an open file


class FetchEnded(Exception):
    """Raised in a fetch whose file is no longer needed."""


class FileFetch:
    """State of one fetch. Its thread reports the file that it writes and how much of it may be read."""

    def __init__(self, size: int, changed: threading.Condition, *, is_ahead: bool) -> None:
        """`changed`: shared by all fetches that wait for each other. `is_ahead`: the file is not being read yet."""
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

    # --- called by the thread -----------------------------------------------------------------------------------

    def writes(self, path: Path) -> None:
        """Report that the fetch writes to the file `path`."""
        with self._changed:
            self._path = path
            self._changed.notify_all()

    def checked(self, count: int) -> None:
        """Report that the first `count` bytes may be read; raises FetchEnded if they are no longer needed."""
        if self._ended:
            raise FetchEnded
        with self._changed:
            self._checked = max(self._checked, count)
            self._changed.notify_all()

    def moves(self, path: Path) -> None:
        """Rename the complete file to `path`."""
        with self._changed:
            assert self._path is not None
            os.replace(self._path, path)
            self._path = path

    # --- called by readers --------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._result is not None

    def end(self) -> None:
        """End the fetch at its next bytes, or at once if it waits for another fetch."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until the fetch is over; raises its exception, if any."""
        self.wait_over()
        self._raise()

    def wait_over(self, within_s: float | None = None, unless: FileFetch | None = None) -> None:
        """Wait until the fetch is over, with any result, or until the fetch `unless`, which waits for it, has been
        ended.
        """
        with self._changed:
            over = lambda: self._result is not None or (unless is not None and unless._ended)  # noqa: E731
            self._changed.wait_for(over, within_s)

    def wait_beyond(self, at: int) -> int:
        """Wait until more than `at` bytes may be read; returns their number. Raises the fetch's exception."""
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None or self._checked > at or at >= self.size)
            if self._checked > at or at >= self.size:
                return self._checked
        self._raise()
        return self.size

    def open(self) -> BinaryIO:
        """Open the file while it grows; raises FileNotFoundError if it was removed already."""
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
    """A file that is being fetched: a read waits for checked bytes."""

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
        """Fill `buffer` with the available bytes; raises the exception that ended the fetch."""
        count = min(len(buffer), max(0, self._fetch.wait_beyond(self._at) - self._at))
        found = os.pread(self._file.fileno(), count, self._at)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)

    def close(self) -> None:
        self._file.close()
        super().close()


class CheckedPieces:
    """Sink of `HttpFetcher.fetch` that checks each piece of one file as its bytes arrive, in order."""

    def __init__(self, file: IO[bytes], indexed: IndexedFile, url: str, checked: Callable[[int], None]) -> None:
        """`checked` is called with the number of checked bytes from the start, each time that it has grown.

        An exception that it raises ends the fetch.
        """
        self._file, self._indexed, self._url, self._checked = file, indexed, url, checked
        self.name = str(file.name)
        self._pieces = indexed.pieces or ([indexed.sha256] if indexed.bytes else [])
        self._piece_bytes = indexed.piece_bytes if indexed.pieces else indexed.bytes
        self._right = 0  # number of checked pieces in the file
        self._damaged: int | None = None  # the last damaged piece
        self.seek(0)

    def tell(self) -> int:
        return self._at

    def seek(self, at: int) -> int:
        """Start again at the beginning of the file; `at` must be 0."""
        assert at == 0
        self._at, self._hash = 0, hashlib.sha256()
        return 0

    def truncate(self) -> int:
        """Does nothing, so that the checked pieces are kept."""
        return self._at

    def read(self, count: int) -> bytes:
        """Bytes of the complete file, for checking its digest as a whole."""
        self._file.seek(self._at)
        found = self._file.read(count)
        self._at += len(found)
        return found

    def write(self, chunk: bytes) -> int:
        """Accept the next bytes; raises PassingFault for a damaged piece, ConfigError if it was damaged before."""
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
            raise TransientError("the received bytes have another SHA-256")
        if number >= self._right:
            self._file.flush()
            self._right = number + 1

    def _fault(self, number: int) -> str:
        if len(self._pieces) == 1:
            return f"{self._url}: its SHA-256 is not {self._pieces[0]}, as the index says"
        where = f"{self._piece_bytes} bytes from {self._at} on"
        return f"{self._url}: the SHA-256 of the {where} is not {self._pieces[number]}, as the index says"
