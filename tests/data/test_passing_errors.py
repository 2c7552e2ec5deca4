"""Transient and permanent errors of a user's dataset. Error classes of libraries that may be missing are imitated."""

from __future__ import annotations

import http.client
import io
import multiprocessing
import ssl
import urllib.error
from email.message import Message
from types import SimpleNamespace

import pytest

from peerd.data.user_dataset import may_pass


def made(*names: str, base: type[Exception] = Exception) -> type[Exception]:
    """Create a chain of classes, each named `module.Name` and derived from the one before it; returns the last."""
    for name in names:
        module, _, own = name.rpartition(".")
        base = type(own, (base,), {"__module__": module})
    return base


def answered(kind: type[Exception], status: int, as_response: bool = True) -> Exception:
    """An error for an HTTP response with this status."""
    error = kind("answered")
    vars(error).update({"response": SimpleNamespace(status_code=status)} if as_response else {"status": status})
    return error


def by_urllib(status: int) -> Exception:
    return urllib.error.HTTPError("https://example.org/a", status, "reason", Message(), io.BytesIO())


HTTPX_STATUS = made("httpx.HTTPError", "httpx.HTTPStatusError")
REQUESTS = made("requests.exceptions.RequestException", base=OSError)
REQUESTS_STATUS = made("requests.exceptions.HTTPError", base=REQUESTS)
AIOHTTP_STATUS = made("aiohttp.client_exceptions.ClientError", "aiohttp.client_exceptions.ClientResponseError")
TRANSPORT = made("httpx.HTTPError", "httpx.TransportError")

PASSES = [
    ConnectionResetError("reset"),
    TimeoutError("late"),
    multiprocessing.TimeoutError("late"),
    urllib.error.URLError("no route"),
    http.client.IncompleteRead(b"half", 9),
    http.client.RemoteDisconnected("closed"),
    http.client.BadStatusLine("?"),
    made("httpx.TimeoutException", "httpx.ReadTimeout", base=TRANSPORT)("late"),
    made("httpx.NetworkError", "httpx.ConnectError", base=TRANSPORT)("refused"),
    made("httpx.RemoteProtocolError", "mine.Wrapped", base=TRANSPORT)("a user's own subclass"),
    made("httpcore._exceptions.NetworkError", "httpcore._exceptions.ReadError")("reset"),
    made("urllib3.exceptions.HTTPError", "urllib3.exceptions.ProtocolError")("broken"),
    made("urllib3.exceptions.HTTPError", "urllib3.exceptions.MaxRetryError")("retries"),
    made("requests.exceptions.ConnectionError", base=REQUESTS)("refused"),
    made("aiohttp.client_exceptions.ClientPayloadError")("broke off"),
    made("botocore.exceptions.HTTPClientError", "botocore.exceptions.ConnectionClosedError")("closed"),
    answered(HTTPX_STATUS, 503),
    answered(REQUESTS_STATUS, 429),
    answered(AIOHTTP_STATUS, 502, as_response=False),
    by_urllib(500),
]
LASTS = [
    KeyError("text"),
    ValueError("of the user's"),
    AttributeError("of the user's"),
    RuntimeError("of the user's"),
    FileNotFoundError("gone"),
    io.UnsupportedOperation("not readable"),
    ssl.SSLCertVerificationError("expired"),
    http.client.CannotSendRequest("a second request"),
    http.client.InvalidURL("no port"),
    made("httpx.InvalidURL")("no host"),
    made("httpx.UnsupportedProtocol", base=TRANSPORT)("ftp"),
    made("httpx.StreamError", "httpx.StreamConsumed", base=RuntimeError)("read twice"),
    made("requests.exceptions.TooManyRedirects", base=REQUESTS)("30"),
    type("MissingSchema", (REQUESTS, ValueError), {"__module__": "requests.exceptions"})("no scheme"),
    made("urllib3.exceptions.HTTPError", "urllib3.exceptions.DecodeError")("not gzip"),
    made("mine.TimeoutException")("a user's own class of that name"),
    answered(HTTPX_STATUS, 404),
    answered(REQUESTS_STATUS, 401),
    answered(AIOHTTP_STATUS, 403, as_response=False),
    by_urllib(404),
]


def named(error: object) -> str:
    return f"{type(error).__module__}.{type(error).__name__}"


@pytest.mark.parametrize("error", PASSES, ids=named)
def test_a_fault_of_a_network_or_a_server_may_pass(error: Exception) -> None:
    assert may_pass(error)


@pytest.mark.parametrize("error", LASTS, ids=named)
def test_an_error_of_the_code_or_of_an_address_does_not(error: Exception) -> None:
    assert not may_pass(error)
