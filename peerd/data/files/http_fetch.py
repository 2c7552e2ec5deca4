"""Fetches one http(s) address into a file, with bounds, checks and resumption after a lost connection.

Called in a worker's thread; blocks. The server is not trusted: it may send too little, too much, other content, very
slowly, endlessly, or redirect. The size is therefore bounded before the first byte and checked after the last; a known
digest must match; certificates are verified; a redirect may lead to https, or to http if the request used http, and to
nothing else (no file, no ftp); addresses given by strangers are fetched from the public internet only. Each read has a
timeout, and the whole transfer a minimum speed. Temporary failures (a lost connection, a busy server) are retried after
a pause that doubles. Permanent ones (404, an invalid certificate) raise ConfigError.
"""

from __future__ import annotations

import hashlib
import http.client
import ssl
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from typing import IO, Any, Final, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from peerd.core.errors import ConfigError, PeerdError
from peerd.core.limits import HTTP_PAUSE_S, HTTP_REDIRECTS
from peerd.core.work import RateLimitedRead, read_at_once
from peerd.data.files.public_connection import PublicHandler

READ_TIMEOUT_S: Final = 30.0  # for one read, and for the whole transfer in addition to its bytes
SLOWEST_BYTES_PER_S: Final = 16 << 10
PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts
CHUNK_BYTES: Final = 1 << 20
PASSING_STATUS: Final = frozenset({408, 416, 425, 429, 500, 502, 503, 504})  # another attempt may succeed


class DataUnavailable(PeerdError):
    """A server could not be reached, or the connection broke each time; a later attempt may succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedContent:
    """Expectations of the bytes to be fetched. `size`: exact size, or None if only `most` limits it."""

    most: int
    size: int | None = None
    sha256: str = ""
    told_by: str = "the index"  # source of size and digest, for messages


class FetchSink(Protocol):
    """Destination of fetched bytes: a file, of which only these methods are used."""

    @property
    def name(self) -> str: ...

    def tell(self) -> int: ...

    def seek(self, at: int, /) -> int: ...

    def truncate(self) -> int: ...

    def read(self, count: int, /) -> bytes: ...

    def write(self, chunk: bytes, /) -> int: ...


class UrlOpener(Protocol):
    """The part of `urllib.request.OpenerDirector` that is used."""

    def open(self, fullurl: urllib.request.Request, *, timeout: float) -> Any: ...


class TransientError(Exception):
    """This attempt failed, but another one may succeed; `pause_s` is the pause that the server requested."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class HttpFetcher:
    """Fetches addresses. `in_turn`: wraps reads to limit their rate; `public_only`: allow only https to public hosts.

    The other arguments are for tests: an opener, a clock, a pause.
    """

    def __init__(
        self,
        opener: UrlOpener | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        in_turn: RateLimitedRead = read_at_once,
        public_only: bool = False,
    ) -> None:
        self._public_only = public_only
        self._opener = opener  # created at first use, since it loads all certificates
        self._clock = clock
        self._pause = pause
        self._in_turn = in_turn

    def fetch(self, url: str, wanted: ExpectedContent, sink: IO[bytes] | FetchSink) -> None:
        """Fetch `url` into `sink`, which is empty; raises ConfigError or DataUnavailable on failure."""
        damaged = False
        for pause_s in (*PAUSES_S, None):
            try:
                self._attempt(url, wanted, sink)
                if _fits(wanted, sink):
                    return
                if damaged:  # the first mismatch may be a transfer error, a second one is the file
                    raise ConfigError(f"{url}: its SHA-256 is not {wanted.sha256}, as {wanted.told_by} says")
                damaged = True
                _empty(sink)
                raise TransientError("the received bytes have another SHA-256")
            except TransientError as failure:
                if pause_s is None:
                    raise DataUnavailable(f"{url}: {failure} (tried {len(PAUSES_S) + 1} times)") from failure
                self._pause(max(pause_s, failure.pause_s))

    def _attempt(self, url: str, wanted: ExpectedContent, sink: IO[bytes] | FetchSink) -> None:
        """Fetch the bytes that `sink` does not have yet."""
        if not wanted.sha256:
            _empty(sink)  # without a digest, two parts cannot be checked to belong together
        have = sink.tell()
        opener = self._opener = self._opener or _safe_opener(self._public_only)
        request = urllib.request.Request(url, headers={"User-Agent": "peerd", "Accept-Encoding": "identity"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        try:
            with opener.open(request, timeout=READ_TIMEOUT_S) as answer:
                if have and not _goes_on(answer, have):
                    _empty(sink)
                self._copy(url, answer, wanted, sink)
        except HTTPError as error:
            error.close()
            if error.code == 416:  # the server has no more bytes than `sink`: start again
                _empty(sink)
            if error.code in PASSING_STATUS:
                raise TransientError(f"the server answered {error.code} {error.reason}", _asked_pause(error)) from error
            raise ConfigError(f"{url}: the server answered {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _reason(url, error) from error

    def _copy(self, url: str, answer: Any, wanted: ExpectedContent, sink: IO[bytes] | FetchSink) -> None:
        took_s = 0.0  # only the server's time, without waiting for our turn
        begin = sink.tell()
        _check_length(url, answer, wanted, begin)

        def read(most: int) -> bytes:
            nonlocal took_s
            started = self._clock()
            chunk: bytes = answer.read1(most)
            took_s += self._clock() - started
            return chunk

        while chunk := self._in_turn(read, CHUNK_BYTES):
            if sink.tell() + len(chunk) > (wanted.most if wanted.size is None else wanted.size):
                raise ConfigError(f"{url}: {_too_large(wanted)}")
            _write(sink, chunk)
            if took_s > READ_TIMEOUT_S + (sink.tell() - begin) / SLOWEST_BYTES_PER_S:
                raise TransientError(f"slower than {SLOWEST_BYTES_PER_S >> 10} KiB/s")
        whole = _content_length(answer)
        expected = wanted.size if wanted.size is not None else None if whole is None else begin + whole
        if expected is not None and sink.tell() < expected:
            raise TransientError(f"broke off after {sink.tell()} of {expected} bytes")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a few redirects, never from https to a weaker scheme."""

    max_redirections = HTTP_REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        fp.close()  # otherwise the redirect's body would be read to its end, however long
        allowed = {"https"} if req.type == "https" else {"http", "https"}
        if urlsplit(newurl).scheme not in allowed:
            raise ConfigError(f"{req.full_url}: redirects to {newurl[:200]}; allowed: {' or '.join(allowed)}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _safe_opener(public_only: bool) -> UrlOpener:
    """An opener for http and https only, with the machine's proxies and certificates."""
    opener, tls = urllib.request.OpenerDirector(), ssl.create_default_context()
    http_and_https = (urllib.request.HTTPHandler(), urllib.request.HTTPSHandler(context=tls))
    for handler in (
        urllib.request.ProxyHandler(),
        *((PublicHandler(tls),) if public_only else http_and_https),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        _Redirects(),
    ):
        opener.add_handler(handler)
    return opener


def _empty(sink: IO[bytes] | FetchSink) -> None:
    sink.seek(0)
    sink.truncate()


def _fits(wanted: ExpectedContent, sink: IO[bytes] | FetchSink) -> bool:
    """True if the digest matches, or none is known."""
    if not wanted.sha256:
        return True
    digest = hashlib.sha256()
    sink.seek(0)
    while chunk := sink.read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest() == wanted.sha256


def _goes_on(answer: Any, have: int) -> bool:
    """True if the answer continues after `have` bytes, as requested; a server may also send everything again."""
    return answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(f"bytes {have}-")


def _check_length(url: str, answer: Any, wanted: ExpectedContent, begin: int) -> None:
    length = _content_length(answer)
    if length is None:
        return
    whole = begin + length
    if whole > (wanted.most if wanted.size is None else wanted.size):
        raise ConfigError(f"{url}: has {whole} bytes; {_too_large(wanted)}")
    if wanted.size is not None and whole < wanted.size:
        raise ConfigError(f"{url}: has {whole} bytes; {wanted.told_by} says {wanted.size}")


def _too_large(wanted: ExpectedContent) -> str:
    return (
        f"more than the {wanted.most} that are allowed"
        if wanted.size is None
        else f"{wanted.told_by} says {wanted.size}"
    )


def _content_length(answer: Any) -> int | None:
    text = answer.headers.get("Content-Length")
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else None


def _asked_pause(error: HTTPError) -> float:
    headers: Message = error.headers
    text = str(headers.get("Retry-After", ""))
    return min(float(text), HTTP_PAUSE_S) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0


def _reason(url: str, error: OSError | http.client.HTTPException) -> Exception:
    """The exception for a failure below http."""
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return ConfigError(f"{url}: the server's certificate is not valid: {cause.verify_message}")
    if isinstance(cause, TimeoutError):
        return TransientError(f"no answer within {READ_TIMEOUT_S:g} s")
    text = str(cause.strerror or cause) if isinstance(cause, OSError) else str(cause)
    return TransientError(text[:200] or type(cause).__name__)


def _write(sink: IO[bytes] | FetchSink, chunk: bytes) -> None:
    """Write a chunk. A full disk is this machine's fault, so it is not retried."""
    try:
        sink.write(chunk)
    except OSError as error:
        raise ConfigError(f"{sink.name}: cannot be written: {error.strerror or error}") from error
