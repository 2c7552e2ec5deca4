"""Fetching against servers that are played: how slow, how large, how secure one may be, and when to try again."""

from __future__ import annotations

import hashlib
import io
import itertools
import ssl
import urllib.request
from collections.abc import Callable
from email.message import Message
from http.client import IncompleteRead
from typing import Any
from urllib.error import URLError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import ConfigError
from peerd.data.files.http_fetch import (
    CHUNK_BYTES,
    PAUSES_S,
    READ_TIMEOUT_S,
    SLOWEST_BYTES_PER_S,
    DataUnavailable,
    ExpectedContent,
    HttpFetcher,
    _Redirects,
)

URL = "https://data.example/shard"
BODY = bytes(range(256)) * 8
WANTED = ExpectedContent(most=len(BODY), size=len(BODY), sha256=hashlib.sha256(BODY).hexdigest())


class Played:
    """An answer of the server: chunks as they arrive, each after some seconds."""

    def __init__(self, server: Server, chunks: list[Any], status: int = 200, **headers: str) -> None:
        self.server, self.chunks, self.status = server, list(chunks), status
        self.headers = Message()
        for name, value in headers.items():
            self.headers[name.replace("_", "-")] = value

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.closed += 1

    def read1(self, most: int) -> bytes:
        self.server.now += self.server.seconds_per_read
        if not self.chunks:
            return b""
        chunk = self.chunks.pop(0)
        if isinstance(chunk, Exception):
            raise chunk
        assert len(chunk) <= most
        return bytes(chunk)


class Server:
    """An opener, a clock and a pause in one: the next answer, or failure, for each request."""

    def __init__(self, *answers: list[Any] | Exception, seconds_per_read: float = 0.0, **headers: str) -> None:
        self.answers, self.headers, self.seconds_per_read = list(answers), headers, seconds_per_read
        self.now = 0.0
        self.closed = 0
        self.waited: list[float] = []
        self.requests: list[urllib.request.Request] = []
        self.timeouts: set[float] = set()

    def open(self, fullurl: urllib.request.Request, *, timeout: float) -> Played:
        self.requests.append(fullurl)
        self.timeouts.add(timeout)
        answer = self.answers.pop(0) if self.answers else []
        if isinstance(answer, Exception):
            raise answer
        start = fullurl.get_header("Range")
        if start is None:
            return Played(self, answer, **self.headers)
        return Played(self, answer, 206, Content_Range=f"{start.replace('=', ' ')}{len(BODY) - 1}/{len(BODY)}")

    def fetch(self, wanted: ExpectedContent = WANTED) -> bytes:
        sink = io.BytesIO()
        HttpFetcher(self, lambda: self.now, self.waited.append).fetch(URL, wanted, sink)
        return sink.getvalue()


def test_a_file_is_asked_for_once_with_a_time_out() -> None:
    server = Server([BODY[:1000], BODY[1000:]])
    assert server.fetch() == BODY
    assert server.timeouts == {READ_TIMEOUT_S}
    assert (server.closed, server.waited) == (1, [])


def test_it_reads_in_turn_and_no_more_than_it_may() -> None:
    asked: list[int] = []

    def in_turn(read: Callable[[int], bytes], most: int) -> bytes:
        asked.append(most)
        server.now += 100.0  # others go first
        return read(512)

    server = Server([BODY[at : at + 512] for at in range(0, len(BODY), 512)])
    sink = io.BytesIO()
    HttpFetcher(server, lambda: server.now, server.waited.append, in_turn).fetch(URL, WANTED, sink)
    assert sink.getvalue() == BODY
    assert asked == [CHUNK_BYTES] * (len(BODY) // 512 + 1)
    assert server.waited == []  # a turn that comes late is not the server's fault


@given(cuts=st.lists(st.integers(0, len(BODY)), max_size=5))
def test_however_a_line_breaks_the_file_is_whole(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(BODY)]
    answers = [[BODY[a:b]] for a, b in itertools.pairwise(places)]
    server = Server(*answers)
    assert server.fetch() == BODY
    assert server.waited == list(PAUSES_S[: len(server.requests) - 1])


def test_a_server_that_drips_is_given_up() -> None:
    """One byte, or none, each time just before the read would time out: only the whole's speed shows it."""
    server = Server(*[[BODY[n : n + 1] for n in range(2000)]] * 6, seconds_per_read=READ_TIMEOUT_S - 1)
    with pytest.raises(DataUnavailable, match=rf"slower than {SLOWEST_BYTES_PER_S >> 10} KiB/s \(tried 6 times\)"):
        server.fetch()
    assert server.now < 6 * 3 * READ_TIMEOUT_S
    assert server.closed == 6


@pytest.mark.parametrize("failure", [TimeoutError(), URLError(TimeoutError("timed out"))])
def test_a_silent_server_is_tried_again_and_given_up(failure: Exception) -> None:
    assert Server(failure, [BODY]).fetch() == BODY
    with pytest.raises(DataUnavailable, match=rf"{URL}: no answer within 30 s \(tried 6 times\)"):
        Server(*[failure] * 6).fetch()


def test_a_server_that_falls_silent_half_way_is_gone_on_with() -> None:
    server = Server([BODY[:500], TimeoutError()], [BODY[500:700], ConnectionResetError()], [BODY[700:]])
    assert server.fetch() == BODY
    assert [request.get_header("Range") for request in server.requests] == [None, "bytes=500-", "bytes=700-"]


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "Connection reset by peer"),
        (URLError(OSError(-2, "Name or service not known")), "Name or service not known"),
        (IncompleteRead(b"abc"), "IncompleteRead"),
    ],
)
def test_what_went_wrong_is_said_in_words(failure: Exception, words: str) -> None:
    with pytest.raises(DataUnavailable, match=words):
        Server(*[failure] * 6).fetch()


def test_a_wrong_certificate_is_not_tried_again() -> None:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "self-signed certificate"
    server = Server(URLError(error), [BODY])
    with pytest.raises(ConfigError, match=r"the server's certificate is not valid: self-signed certificate"):
        server.fetch()
    assert len(server.requests) == 1


@pytest.mark.parametrize("wanted", [WANTED, ExpectedContent(most=len(BODY))])
def test_a_body_without_end_is_read_no_further_than_allowed(wanted: ExpectedContent) -> None:
    server = Server([BODY, BODY, BODY])
    with pytest.raises(ConfigError, match=r"the index says 2048|more than the 2048 that are allowed"):
        server.fetch(wanted)
    assert server.closed == 1


def test_a_promise_of_too_many_bytes_is_refused_before_the_first() -> None:
    server = Server([BODY], Content_Length="99999999999")
    with pytest.raises(ConfigError, match=r"has 99999999999 bytes; the index says 2048"):
        server.fetch()


@pytest.mark.parametrize("length", ["", "-1", "1e9", "٣", "9" * 30])
def test_a_senseless_length_is_ignored_and_the_bytes_are_counted(length: str) -> None:
    assert Server([BODY], Content_Length=length).fetch() == BODY


def test_a_full_disk_is_no_reason_to_ask_the_server_again() -> None:
    class Full(io.BytesIO):
        name = "/cache/x.part"

        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

    server = Server([BODY])
    with pytest.raises(ConfigError, match=r"/cache/x.part: cannot be written: No space left on device"):
        HttpFetcher(server, lambda: 0.0, server.waited.append).fetch(URL, WANTED, Full())
    assert not server.waited


@pytest.mark.parametrize(
    ("origin", "target", "allowed"),
    [
        ("https://a/x", "https://b/x", True),
        ("http://a/x", "https://b/x", True),
        ("http://a/x", "http://b/x", True),
        ("https://a/x", "http://b/x", False),
        ("https://a/x", "ftp://b/x", False),
    ],
)
def test_a_redirect_never_leads_to_something_weaker(origin: str, target: str, allowed: bool) -> None:
    request, body = urllib.request.Request(origin), io.BytesIO()
    if allowed:
        followed = _Redirects().redirect_request(request, body, 302, "Found", Message(), target)
        assert followed is not None
        assert followed.full_url == target
    else:
        with pytest.raises(ConfigError, match=f"{origin}: redirects to {target}; allowed: https"):
            _Redirects().redirect_request(request, body, 302, "Found", Message(), target)
    assert body.closed
