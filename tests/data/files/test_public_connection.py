"""What a stranger's address leads to: https servers on loopback that stand for the internet and for a home network."""

from __future__ import annotations

import hashlib
import io
import ipaddress
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peerd.core.errors import ConfigError
from peerd.data.files.http_fetch import DataUnavailable, ExpectedContent, HttpFetcher
from peerd.data.files.public_connection import public_addresses
from peerd.run.public_ip import host_fault, is_public
from tests.data.files.test_file_index import certificate
from tests.worlds.processes.webserver import WebServer, serving

NAME, HOME = "data.example", "router.example"
PUBLIC, PRIVATE = "9.9.9.9", "10.0.0.1"
WANTED = ExpectedContent(most=4, size=4, sha256=hashlib.sha256(b"text").hexdigest())

pytestmark = pytest.mark.socket


class Internet:
    """Name servers and routes of a test: names have addresses, answer by answer; each address leads to `web`."""

    def __init__(self, web: WebServer, patch: pytest.MonkeyPatch) -> None:
        self.web, self.dialed = web, list[str]()
        self.names: dict[str, list[list[str]]] = {NAME: [[PUBLIC]], HOME: [[PRIVATE]]}
        self._connect = socket.create_connection
        self._port = int(web.address.rpartition(":")[2])
        patch.setattr(socket, "getaddrinfo", self.resolve)
        patch.setattr(socket, "create_connection", self.dial)
        for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            patch.delenv(name, raising=False)

    def resolve(self, host: str, port: int, *_: object, **__: object) -> list[Any]:
        answers = self.names.get(host, [[host]])
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        kinds = [(socket.AF_INET6 if ":" in text else socket.AF_INET, text) for text in found]
        return [(kind, socket.SOCK_STREAM, 6, "", (text, port)) for kind, text in kinds]

    def dial(self, place: tuple[str, int], *rest: Any, **more: Any) -> socket.socket:
        self.dialed.append(place[0])
        return socket_to("127.0.0.1", self._port)

    def fetch(self, url: str) -> bytes:
        sink = io.BytesIO()
        HttpFetcher(pause=lambda _: None, public_only=True).fetch(url, WANTED, sink)
        return sink.getvalue()


def socket_to(host: str, port: int) -> socket.socket:
    made = socket.socket()
    made.settimeout(10)
    made.connect((host, port))
    return made


@pytest.fixture
def internet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Internet]:
    file = certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    (tmp_path / "served").mkdir()
    (tmp_path / "served/a.txt").write_bytes(b"text")
    with serving(tmp_path / "served", context) as web:
        yield Internet(web, monkeypatch)


def test_a_public_host_is_fetched_from_the_address_that_was_checked(internet: Internet) -> None:
    internet.names[NAME] = [[PUBLIC], [PRIVATE]]  # a name server that answers differently the second time
    assert internet.fetch(f"https://{NAME}/a.txt") == b"text"
    assert internet.dialed == [PUBLIC]
    with pytest.raises(ConfigError, match=f"is at {PRIVATE}; allowed in a run joined by a link: addresses on"):
        internet.fetch(f"https://{NAME}/a.txt")
    assert internet.dialed == [PUBLIC]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "192.88.99.1"),
        *("::1", "::", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "::ffff:10.0.0.1", "::127.0.0.1", "fec0::1"),
        *("64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:a00:1::1", "2001:db8::1"),
        *("2001::1", "3fff::1", "fe80::1%eth0", "4000::1"),
    ],
)
def test_a_name_that_leads_into_a_network_is_never_connected_to(internet: Internet, address: str) -> None:
    internet.names[HOME] = [[address]]
    with pytest.raises(ConfigError, match="allowed in a run joined by a link: addresses on the public internet"):
        internet.fetch(f"https://{HOME}/a.txt")
    assert (internet.dialed, internet.web.asked) == ([], [])


@pytest.mark.parametrize("target", [f"https://{HOME}/a.txt", "https://127.0.0.1/a.txt", "https://[::1]/a.txt"])
def test_a_redirect_into_a_network_is_not_followed(internet: Internet, target: str) -> None:
    internet.web.faults["a.txt"].append(f"to {target}")
    with pytest.raises(ConfigError, match="addresses on the public internet"):
        internet.fetch(f"https://{NAME}/a.txt")
    assert internet.dialed == [PUBLIC]


def test_http_is_not_spoken_at_all(internet: Internet) -> None:
    with pytest.raises((ConfigError, DataUnavailable)):
        internet.fetch(f"http://{NAME}/a.txt")
    assert internet.dialed == []


def test_of_several_addresses_the_public_ones_are_used(internet: Internet) -> None:
    internet.names[NAME] = [[PRIVATE, "2620:fe::fe", PUBLIC]]
    assert public_addresses(NAME, 443) == [PUBLIC, "2620:fe::fe"]
    assert internet.fetch(f"https://{NAME}/a.txt") == b"text"
    assert internet.dialed == [PUBLIC]


def test_a_proxy_is_asked_for_the_address_that_was_checked(internet: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://10.9.9.9:3128")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(ConfigError, match=f"is at {PRIVATE}"):
        internet.fetch(f"https://{HOME}/a.txt")
    assert internet.dialed == []


def test_without_that_restriction_a_private_address_is_the_users_own_word(internet: Internet) -> None:
    sink = io.BytesIO()
    HttpFetcher(pause=lambda _: None).fetch(f"https://{NAME}/a.txt", WANTED, sink)
    assert sink.getvalue() == b"text"


@pytest.mark.parametrize("text", ["9.9.9.9", "2620:fe::fe", "64:ff9b::909:909", "::ffff:9.9.9.9", "2002:909:909::1"])
def test_public_addresses_are_public(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))
    assert host_fault(text) is None


@pytest.mark.parametrize(
    "host", ["", "localhost", "router", "nas.local", "a.internal", "127.1", "0x7f.1", "2130706433"]
)
def test_hosts_that_are_surely_not_public_are_named_before_anything_is_resolved(host: str) -> None:
    assert host_fault(host) is not None
    assert host_fault("data.example.org") is None
