"""Indexes of any content, the cache among several users, and whose certificates are believed."""

from __future__ import annotations

import datetime
import hashlib
import io
import ipaddress
import ssl
import threading
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import example, given
from hypothesis import strategies as st

from peerd.core.errors import ConfigError
from peerd.core.limits import DATA_FILE_BYTES, INDEX_NAME_CHARS
from peerd.data.files.file_index import INDEX_NAME, FileIndex, IndexedFile, make_index, parse_index
from peerd.data.files.http_fetch import ExpectedContent, HttpFetcher
from peerd.data.files.remote_files import RemoteFileCache, remote_files
from peerd.run.runfile import SourceSection
from tests.worlds.processes.webserver import serving

NAMES = st.one_of(
    st.text(max_size=30), st.lists(st.sampled_from(["a", "..", ".", "", "b.txt", "\\", "%2e%2e"])).map("/".join)
)
FILES = st.builds(
    dict,
    name=NAMES,
    bytes=st.one_of(st.integers(-2, 9), st.integers(), st.none(), st.floats()),
    sha256=st.one_of(st.just("ab" * 32), st.text(max_size=70)),
)


@pytest.mark.slow
@given(st.one_of(st.binary(), st.lists(FILES, max_size=4).map(lambda files: msgspec.json.encode({"files": files}))))
@example(b'{"files":' + b"[" * 5000)
@example(b'{"files": [], "more": [1e999, null]}')
def test_an_index_is_read_within_bounds_or_refused_in_words(raw: bytes) -> None:
    files, refusal = [], ""
    try:
        files = parse_index(raw, "here")
    except ConfigError as error:
        refusal = str(error)
    assert refusal == "" or refusal.startswith("here: ")
    assert len(refusal) < 500
    for file in files:
        path = Path("/folder", *file.name.split("/")).resolve()
        assert Path("/folder") in path.parents
        assert 0 < len(file.name) <= INDEX_NAME_CHARS
        assert 0 <= file.bytes <= DATA_FILE_BYTES
        assert len(bytes.fromhex(file.sha256)) == 32


@given(st.lists(st.tuples(st.integers(0, DATA_FILE_BYTES), st.binary(min_size=32, max_size=32)), max_size=5))
def test_an_index_reads_back_as_it_was_written(entries: list[tuple[int, bytes]]) -> None:
    files = [IndexedFile(f"f/{n}", size, digest.hex()) for n, (size, digest) in enumerate(entries)]
    assert parse_index(msgspec.json.encode(FileIndex(files)), "here") == files


@pytest.mark.socket
def test_many_readers_share_a_cache_that_holds_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes away what the others fetched, and each reads its own file whole."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "served"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_bytes(bytes([number + 65]) * 1000)
    (folder / INDEX_NAME).write_bytes(make_index(folder))
    wrong: list[object] = []

    def read(number: int, files: dict[str, object]) -> None:
        for _ in range(5):
            try:
                with files[f"{number}.txt"].open() as opened:  # type: ignore[attr-defined]
                    if opened.read() != bytes([number + 65]) * 1000:
                        wrong.append(number)
            except ConfigError as error:
                if "was deleted by another process each time" not in str(error):  # that would be said rightly
                    wrong.append(error)

    with serving(folder) as web:
        threads = []
        for number in range(4):
            cache = RemoteFileCache(tmp_path / "cache", 1000)
            files = remote_files(SourceSection(path=web.url()), "data", cache)
            threads.append(threading.Thread(target=read, args=(number, files)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert not list((tmp_path / "cache").glob("*.part"))


def certificate(folder: Path) -> Path:
    """A key and a certificate for 127.0.0.1 and data.example that nobody but itself has signed, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "peerd test")])
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("data.example")]
    today = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=2))
        .not_valid_after(today + datetime.timedelta(days=2))
        .add_extension(x509.SubjectAlternativeName(names), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file = folder / "certificate.pem"
    file.write_bytes(private + built.public_bytes(pem))
    return file


@pytest.mark.socket
@pytest.mark.parametrize("case", ["unknown", "known", "another host"])
def test_a_servers_certificate_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("no_proxy", "*")
    file = certificate(tmp_path)
    if case != "unknown":
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
    (tmp_path / "a.txt").write_text("text")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    sink = io.BytesIO()
    wanted = ExpectedContent(most=4, size=4, sha256=hashlib.sha256(b"text").hexdigest())
    with serving(tmp_path, context) as web:
        url = web.url("a.txt")
        if case == "known":
            HttpFetcher().fetch(url, wanted, sink)
            assert sink.getvalue() == b"text"
        else:
            url = url.replace("127.0.0.1", "localhost") if case == "another host" else url
            words = "self-signed certificate" if case == "unknown" else "Hostname mismatch"
            with pytest.raises(ConfigError, match=f"the server's certificate is not valid: {words}"):
                HttpFetcher().fetch(url, wanted, sink)
