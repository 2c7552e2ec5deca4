"""A source that is a torch IterableDataset of the user's own, named as `module:function` of a local file.

The function is called as `function(split, seed)`: `split` is "train" or "valid", `seed` differs between peers and
epochs, so that each sees its own order. It returns an IterableDataset, or anything else that can be iterated. Each
item is one document: str, bytes (UTF-8), or a 1-D tensor or array of token numbers. When it ends, the next epoch
calls the function again. What is held out is the function's own matter.

A position is a count of documents: to go on from it is to run through the documents before it, so equal seeds must
give equal documents, and a far position takes time.

What the user's code raises is reported by the name of the function, with file and line. A lost connection or a server
that is too slow is DataUnavailable, and the stream asks again for the same document. Anything else is a ConfigError.
Libraries that fetch have exceptions of their own, of which few are OSErrors. `may_pass` knows such a class by the
package and the name of one of its bases, so that no library is imported that the user's code has not loaded.
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

from peerd.compute.data.corpus import Split
from peerd.compute.data.http_fetch import PASSING_STATUS, DataUnavailable
from peerd.compute.data.readers import Cursor, Text, TextPiece
from peerd.compute.data.skipped_rows import SkippedRows
from peerd.compute.user_code import find_function
from peerd.core.errors import ConfigError, PeerdError
from peerd.local_code import told

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
# Bases of exceptions of a network, by package.
_PASSING_BASES: Final[Mapping[str, frozenset[str]]] = {
    "aiohttp": frozenset({"ClientConnectionError", "ClientPayloadError"}),
    "botocore": frozenset({"ConnectionError", "HTTPClientError"}),
    "httpcore": frozenset({"NetworkError", "ProxyError", "RemoteProtocolError", "TimeoutException"}),
    "httpx": frozenset({"NetworkError", "ProxyError", "RemoteProtocolError", "TimeoutException"}),
    "multiprocessing": frozenset({"TimeoutError"}),
    "urllib3": frozenset({"MaxRetryError", "NewConnectionError", "ProtocolError", "ProxyError", "TimeoutError"}),
}
# Exceptions that another attempt does not mend, though they are OSErrors or have such a base.
_LASTING_BASES: Final[Mapping[str, frozenset[str]]] = {
    "aiohttp": frozenset({"ServerFingerprintMismatch"}),
    "requests": frozenset({"InvalidJSONError", "TooManyRedirects", "URLRequired"}),
}
# Exceptions for an answer with a status.
_ANSWERS: Final[Mapping[str, frozenset[str]]] = {
    "aiohttp": frozenset({"ClientResponseError"}),
    "httpx": frozenset({"HTTPStatusError"}),
    "requests": frozenset({"HTTPError"}),
    "urllib": frozenset({"HTTPError"}),
}


class Dataset:
    """The documents of one split, epoch by epoch; to a stream it looks like a corpus of one file."""

    def __init__(self, path: str, key: str, split: Split, name: str) -> None:
        """`path`: module:function; `key`: of the run file, for messages; `name`: of this stream's random numbers."""
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
        """The user's code prepares what it likes."""

    def _asked(self, job: Callable[[], Any], place: str) -> Any:
        """Returns the result of the user's code."""
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
        allowed = "str, bytes or a 1-D tensor of whole numbers"
        raise ConfigError(f"{self._where}, document {number}: expected {allowed}, found {found[:200]}")


def may_pass(error: Exception) -> bool:
    """True for a fault of a network or a server: the same call may succeed later.

    False for errors of the code or the settings, such as an address that makes no sense or a certificate that is not
    valid: these are ValueErrors or TypeErrors, also where they are OSErrors. An answer with a status, such as 404, goes
    by the status.
    """
    if isinstance(error, _LASTING) or _is_one_of(error, _LASTING_BASES):
        return False
    if _is_one_of(error, _ANSWERS) and (status := _status(error)) is not None:
        return status in PASSING_STATUS
    return isinstance(error, _PASSING) or _is_one_of(error, _PASSING_BASES)


def _is_one_of(error: Exception, bases: Mapping[str, frozenset[str]]) -> bool:
    """True if the class of `error`, or a base of it, is one of `bases`."""
    return any(kind.__name__ in bases.get(kind.__module__.partition(".")[0], ()) for kind in type(error).__mro__)


def _status(error: Exception) -> int | None:
    """The status of the answer that `error` reports; None if it does not say."""
    response = getattr(error, "response", None)
    found = (getattr(error, "code", None), getattr(error, "status", None), getattr(response, "status_code", None))
    return next((status for status in found if isinstance(status, int)), None)
