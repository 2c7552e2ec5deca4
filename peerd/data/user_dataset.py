"""A data source that is a user's own torch IterableDataset, named as `module:function` of a local file.

The function is called as `function(split, seed)`: `split` is "train" or "valid"; `seed` differs between peers and
epochs, so that each has its own order. It returns an IterableDataset or any other iterable. Each item is one document:
str, bytes (UTF-8), or a 1-D tensor or array of token numbers. When it ends, the next epoch calls the function again.
The function itself decides which documents are held out for validation.

A position is a count of documents. To resume, all documents before it are iterated again, so equal seeds must give
equal documents, and resuming late in an epoch takes time.

Errors of the user's code are reported with the name of the function, the file and the line. A temporary failure, such
as a lost connection or a server that is too slow, raises DataUnavailable, and the stream requests the same document
again. Any other error raises ConfigError. Libraries that fetch data define their own exceptions, and few of these are
OSErrors. `may_pass` recognizes such a class by its package and the name of one of its bases, so that peerd imports no
library that the user's code has not imported.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import outcome
import torch

from peerd.core.errors import ConfigError, PeerdError
from peerd.data.corpus import Split
from peerd.data.files.http_fetch import PASSING_STATUS, DataUnavailable
from peerd.data.readers import Cursor, Text, TextPiece
from peerd.data.skipped_rows import SkippedRows
from peerd.run.local_code import told
from peerd.run.user_code import find_function

_LASTING: Final = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    TypeError,
)
_PASSING: Final = (OSError, http.client.IncompleteRead, http.client.BadStatusLine)
# Names of base classes of temporary network errors, by package.
_PASSING_BASES: Final[Mapping[str, frozenset[str]]] = {
    "aiohttp": frozenset({"ClientConnectionError", "ClientPayloadError"}),
    "botocore": frozenset({"ConnectionError", "HTTPClientError"}),
    "httpcore": frozenset({"NetworkError", "ProxyError", "RemoteProtocolError", "TimeoutException"}),
    "httpx": frozenset({"NetworkError", "ProxyError", "RemoteProtocolError", "TimeoutException"}),
    "multiprocessing": frozenset({"TimeoutError"}),
    "urllib3": frozenset({"MaxRetryError", "NewConnectionError", "ProtocolError", "ProxyError", "TimeoutError"}),
}
# Names of permanent errors that are OSErrors or have a base in _PASSING_BASES, by package.
_LASTING_BASES: Final[Mapping[str, frozenset[str]]] = {
    "aiohttp": frozenset({"ServerFingerprintMismatch"}),
    "requests": frozenset({"InvalidJSONError", "TooManyRedirects", "URLRequired"}),
}
# Names of errors that report a response with an HTTP status, by package.
_ANSWERS: Final[Mapping[str, frozenset[str]]] = {
    "aiohttp": frozenset({"ClientResponseError"}),
    "httpx": frozenset({"HTTPStatusError"}),
    "requests": frozenset({"HTTPError"}),
    "urllib": frozenset({"HTTPError"}),
}


class Dataset:
    """The documents of one split, epoch by epoch; the stream uses it like a corpus with one file."""

    def __init__(self, path: str, key: str, split: Split, name: str) -> None:
        """`path`: module:function; `key`: in the run file, for messages; `name`: of this stream's random numbers."""
        self._function = find_function(path, key)
        self._where = f"{key} {path}"
        self._split = split
        self._name = name
        self.files: Sequence[str] = [path]
        self.skipped = SkippedRows()

    def read(self, file: str, cursor: Cursor | None = None, epoch: int = 0) -> Iterator[TextPiece]:
        """The documents of an epoch from `cursor` on."""
        seed = int.from_bytes(hashlib.sha256(f"{self._name} epoch {epoch}".encode()).digest()[:4], "big") >> 1
        documents = self._asked(lambda: self._function(self._split, seed), "")
        if not isinstance(documents, Iterable):
            raise ConfigError(f"{self._where} returned {type(documents).__name__}; expected an IterableDataset")
        first = 0 if cursor is None else cursor.at
        items: Iterator[object] = self._asked(lambda: iter(documents), "")
        end = object()
        for number in itertools.count():
            document = self._asked(lambda: next(items, end), f", document {number}")
            if document is end:
                return
            if number >= first:
                yield TextPiece(Cursor(number), self._text(document, number), True)

    def fetch_ahead(self, file: str) -> None:
        """Does nothing: prefetching is up to the user's code."""

    def _asked(self, job: Callable[[], Any], place: str) -> Any:
        """Run a job that calls the user's code; returns its result."""
        result = outcome.capture(job)
        if isinstance(result, outcome.Value):
            return result.value
        error = result.error
        if not isinstance(error, Exception) or isinstance(error, PeerdError):
            raise error
        text = f"{self._where}{place}: the function raised {told(error)}"
        if may_pass(error):
            raise DataUnavailable(text) from error
        raise ConfigError(text) from error

    def _text(self, document: object, number: int) -> Text:
        if isinstance(document, str):
            return document.encode(errors="replace")
        if isinstance(document, bytes):
            return document
        tokens = document.detach().cpu().numpy() if isinstance(document, torch.Tensor) else document
        if isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu":
            return tokens
        found = repr(document) if not isinstance(tokens, np.ndarray) else f"{tokens.dtype} {list(tokens.shape)}"
        allowed = "str, bytes or a 1-D tensor of integers"
        raise ConfigError(f"{self._where}, document {number}: expected {allowed}, found {found[:200]}")


def may_pass(error: Exception) -> bool:
    """True for a temporary failure of the network or a server: the same call may succeed later.

    False for errors in the code or the settings, such as a malformed address or an invalid certificate: these are
    ValueErrors or TypeErrors, even if they are OSErrors, too. If `error` reports an HTTP status, the status decides:
    503 is temporary, 404 is not.
    """
    if isinstance(error, _LASTING) or _is_one_of(error, _LASTING_BASES):
        return False
    if _is_one_of(error, _ANSWERS) and (status := _status(error)) is not None:
        return status in PASSING_STATUS
    return isinstance(error, _PASSING) or _is_one_of(error, _PASSING_BASES)


def _is_one_of(error: Exception, bases: Mapping[str, frozenset[str]]) -> bool:
    """True if the class of `error`, or one of its bases, is in `bases` (package to class names)."""
    return any(kind.__name__ in bases.get(kind.__module__.partition(".")[0], ()) for kind in type(error).__mro__)


def _status(error: Exception) -> int | None:
    """HTTP status of the response that `error` reports, or None if it has no status."""
    response = getattr(error, "response", None)
    found = (getattr(error, "code", None), getattr(error, "status", None), getattr(response, "status_code", None))
    return next((status for status in found if isinstance(status, int)), None)
