"""Text from a web server: the same samples as from files, a bounded cache, and servers that fail or lie."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from peerd.core.errors import ConfigError
from peerd.data.files.file_index import INDEX_NAME, main, make_index
from peerd.data.files.http_fetch import PAUSES_S, DataUnavailable, HttpFetcher
from peerd.data.files.remote_files import ABANDONED_S, RemoteFileCache, default_folder, remote_files
from peerd.data.stream import SampleStream
from peerd.data.tokenizer import load_vocabulary
from peerd.run.runfile import DataSection, SourceSection
from tests.worlds.processes.webserver import WebServer, serving

pytestmark = pytest.mark.socket

FIRST = "000.txt"


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """Three texts of 500 bytes and their index."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "served"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number:03d}.txt").write_bytes(bytes([number + 65]) * 500)
    (folder / INDEX_NAME).write_bytes(make_index(folder))
    with serving(folder) as server:
        yield server


class Waits:
    """A pause that takes no time and is remembered."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def waits() -> Waits:
    return Waits()


@pytest.fixture
def cache(tmp_path: Path, waits: Waits) -> RemoteFileCache:
    return RemoteFileCache(tmp_path / "cache", 10_000, HttpFetcher(pause=waits))


def stream(path: str, cache: RemoteFileCache | None = None, **settings: object) -> SampleStream:
    data = DataSection(path=path, **({"holdout": 0.0, "shuffle_buffer": 64} | settings))  # type: ignore[arg-type]
    return SampleStream(data, load_vocabulary("bytes"), 8, 1, "me", cache=cache)


def read_first(web: WebServer, cache: RemoteFileCache, digest: str = "") -> bytes:
    files = remote_files(SourceSection(path=web.url(), digest=digest), "data", cache)
    with files[FIRST].open("rb") as opened:
        return opened.read()


def kept(cache: RemoteFileCache) -> set[str]:
    """The cache's files, each by its first letter."""
    return {chr(path.read_bytes()[0]) for path in cache.folder.iterdir()}


@pytest.mark.parametrize("slash", ["", "/"])
def test_samples_from_a_server_are_those_of_the_files(web: WebServer, cache: RemoteFileCache, slash: str) -> None:
    (web.folder / INDEX_NAME).rename(web.folder.parent / INDEX_NAME)
    local = stream(str(web.folder))
    (web.folder.parent / INDEX_NAME).rename(web.folder / INDEX_NAME)
    remote = stream(web.address + slash, cache)
    assert remote.files == 3
    assert torch.equal(local.take(400), remote.take(400))
    asked = [path for path, _ in web.asked]
    assert sorted(asked) == [FIRST, "001.txt", "002.txt", INDEX_NAME]  # more than one epoch, each file once


def test_names_with_folders_and_odd_characters_are_found(web: WebServer, cache: RemoteFileCache) -> None:
    odd = web.folder / "a b" / "ü#?%.txt"
    odd.parent.mkdir()
    odd.write_text("odd")
    (web.folder / INDEX_NAME).write_bytes(make_index(web.folder))
    with remote_files(SourceSection(path=web.url()), "data", cache)["a b/ü#?%.txt"].open() as opened:
        assert opened.read() == b"odd"


def test_a_resumed_stream_over_http_goes_on_with_the_same_samples(web: WebServer, cache: RemoteFileCache) -> None:
    source = stream(web.url(), cache)
    source.take(111)
    later = stream(web.url(), cache)
    later.resume(source.position())
    assert torch.equal(later.take(100), source.take(100))


def test_parquet_is_read_over_http(web: WebServer, cache: RemoteFileCache) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for file in web.folder.iterdir():
        file.unlink()
    parquet.write_table(pyarrow.table({"text": ["x" * 300]}), web.folder / "a.parquet")
    (web.folder / INDEX_NAME).write_bytes(make_index(web.folder))
    assert set(stream(web.url(), cache, kind="parquet").take(80).flatten().tolist()) == {0, ord("x")}


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False}\n", "a NumPy array"),
        (bytes([7, 0, 200, 1]) * 100, "binary: it has bytes of value 0"),  # 16-bit token numbers
        (gzip.compress(bytes([7, 0, 200, 1]) * 100, mtime=0), "binary: it has bytes of value 0"),
    ],
    ids=["npy", "tokens", "packed tokens"],
)
def test_a_binary_file_is_refused_from_a_server_as_from_this_machine(
    web: WebServer, cache: RemoteFileCache, kind: str, begin: bytes, what: str
) -> None:
    for file in web.folder.iterdir():
        file.unlink()
    (web.folder / "tokens.bin").write_bytes(begin)
    with pytest.raises(ConfigError) as here:
        stream(str(web.folder / "*.bin"), kind=kind).take(1)
    (web.folder / INDEX_NAME).write_bytes(make_index(web.folder))
    with pytest.raises(ConfigError) as there:
        stream(web.url(), cache, kind=kind).take(1)
    why = f": is not a text file ({what}); allowed: UTF-8 text, plain or compressed by gzip, bzip2, xz or zstd"
    assert str(here.value) == f"{web.folder / 'tokens.bin'}{why}"
    assert str(there.value) == f"{web.address}/tokens.bin{why}"


# --- the cache ---------------------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_makes_room(web: WebServer, cache: RemoteFileCache) -> None:
    cache = RemoteFileCache(cache.folder, 1000, cache.downloader)
    files = remote_files(SourceSection(path=web.url()), "data", cache)
    for name in (FIRST, "001.txt", FIRST, "002.txt"):
        files[name].open().close()
    assert kept(cache) == {"A", "C"}
    assert len(web.asked) == 4  # the index, and each file once


def test_a_file_that_makes_room_while_it_is_read_is_read_to_its_end(web: WebServer, cache: RemoteFileCache) -> None:
    if sys.platform == "win32":
        pytest.skip("an open file cannot be taken away there")
    cache = RemoteFileCache(cache.folder, 500, cache.downloader)
    files = remote_files(SourceSection(path=web.url()), "data", cache)
    with files[FIRST].open() as opened:
        files["001.txt"].open().close()
        assert kept(cache) == {"B"}
        assert opened.read() == b"A" * 500


def test_a_damaged_file_in_the_cache_is_fetched_again(web: WebServer, cache: RemoteFileCache) -> None:
    read_first(web, cache)
    (path,) = cache.folder.iterdir()
    path.write_bytes(b"A" * 499)
    assert read_first(web, cache) == b"A" * 500


def test_a_file_larger_than_the_cache_is_a_config_error(web: WebServer, cache: RemoteFileCache) -> None:
    with pytest.raises(ConfigError, match=r"^data.path: .*/000.txt has 500 bytes; the cache .*/cache may hold 499"):
        read_first(web, RemoteFileCache(cache.folder, 499))


def test_abandoned_halves_are_cleared_away_and_fresh_ones_are_not(web: WebServer, cache: RemoteFileCache) -> None:
    cache.folder.mkdir()
    old, fresh, other = (cache.folder / name for name in ("old.part", "fresh.part", "notes.txt"))
    for path in (old, fresh, other):
        path.write_text("x")
    os.utime(old, (0, 0))
    assert ABANDONED_S > 60
    read_first(web, cache)
    assert [path.exists() for path in (old, fresh, other)] == [False, True, True]


def test_a_failed_fetch_leaves_nothing_behind(web: WebServer, cache: RemoteFileCache) -> None:
    web.faults[FIRST].append("403")
    with pytest.raises(ConfigError, match=r"/000.txt: the server answered 403 Forbidden"):
        read_first(web, cache)
    assert not list(cache.folder.iterdir())


def test_a_cache_that_cannot_be_written_is_named(web: WebServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/cache: cannot be written: Not a directory"):
        read_first(web, RemoteFileCache(tmp_path / "file" / "cache"))


def test_the_common_cache_lies_where_the_platform_keeps_such_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/peerd/data")


# --- servers that fail -------------------------------------------------------------------------------------------


def test_a_server_without_ranges_sends_everything_again(web: WebServer, cache: RemoteFileCache) -> None:
    web.faults[FIRST].extend(["cut 200", "all"])
    assert read_first(web, cache) == b"A" * 500


def test_an_index_without_a_digest_is_never_put_together_from_two_halves(
    web: WebServer, cache: RemoteFileCache
) -> None:
    web.faults[INDEX_NAME].append("cut 100")
    assert read_first(web, cache) == b"A" * 500
    assert web.asked[:2] == [(INDEX_NAME, ""), (INDEX_NAME, "")]


def test_a_busy_server_is_asked_again_after_the_pause_it_wants(
    web: WebServer, cache: RemoteFileCache, waits: Waits
) -> None:
    web.faults[FIRST].extend(["503", "429", "500"])
    assert read_first(web, cache) == b"A" * 500
    assert waits.seconds == [7, 7, 7]  # the server's Retry-After: longer than ours


def test_a_server_that_keeps_failing_is_unavailable_not_misconfigured(
    web: WebServer, cache: RemoteFileCache, waits: Waits
) -> None:
    web.faults[FIRST].extend(["cut 0"] * 10)
    with pytest.raises(DataUnavailable, match=r"/000.txt: broke off after 0 of 500 bytes \(tried 6 times\)"):
        read_first(web, cache)
    assert waits.seconds == list(PAUSES_S)


@pytest.mark.parametrize("sources", [1, 2])
def test_nothing_is_lost_while_a_server_does_not_answer(web: WebServer, cache: RemoteFileCache, sources: int) -> None:
    """Whenever the files are fetched again after a failure, the samples are those of a server that never fails."""
    each = [SourceSection(path=web.url(), weight=weight) for weight in (0.3, 0.7)]
    one_or_two = {"path": web.url()} if sources == 1 else {"sources": each}
    data = DataSection(holdout=0.0, shuffle_buffer=20, **one_or_two)  # type: ignore[arg-type]
    small = RemoteFileCache(
        cache.folder.with_name("small"), 500, cache.downloader
    )  # one file at a time: fetched each epoch
    steady, shaken = (SampleStream(data, load_vocabulary("bytes"), 8, 1, "me", cache=kept) for kept in (cache, small))
    failures = 0
    for _ in range(60):  # failures of files that are fetched ahead are not reported
        expected = steady.take(13)
        for path in (FIRST, "001.txt", "002.txt"):
            web.faults[path].extend(["503"] * 6)
        while True:
            try:
                assert torch.equal(shaken.take(13), expected)
                break
            except DataUnavailable:
                failures += 1
        for faults in web.faults.values():
            faults.clear()
    assert failures > 5


def test_nobody_there_is_unavailable(cache: RemoteFileCache, web: WebServer) -> None:
    source = SourceSection(path="http://127.0.0.1:1/")  # a port that nobody listens on
    with pytest.raises(DataUnavailable, match=r"http://127.0.0.1:1/index.json: Connection refused"):
        remote_files(source, "data", cache)


def test_a_missing_index_is_a_config_error_at_once(web: WebServer, cache: RemoteFileCache, waits: Waits) -> None:
    with pytest.raises(ConfigError, match=r"^data.path: http://.*/sub/index.json: the server answered 404 Not Found"):
        stream(web.url("sub"), cache)
    assert not waits.seconds


# --- servers that lie --------------------------------------------------------------------------------------------


def test_a_damaged_byte_is_noticed_and_fetched_once_more(web: WebServer, cache: RemoteFileCache) -> None:
    web.faults[FIRST].append("flip")
    assert read_first(web, cache) == b"A" * 500


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("flip", r"its SHA-256 is not [0-9a-f]{64}, as the index says"),
        ("short", r"has 499 bytes; the index says 500"),
        ("long", r"has 501 bytes; the index says 500"),
    ],
)
def test_a_file_that_is_not_the_indexs_is_refused(
    web: WebServer, cache: RemoteFileCache, fault: str, words: str
) -> None:
    web.faults[FIRST].extend([fault] * 2)
    with pytest.raises(ConfigError, match=rf"/000.txt: {words}"):
        read_first(web, cache)
    assert not list(cache.folder.iterdir())


def test_an_index_with_another_digest_than_the_run_files_is_refused(web: WebServer, cache: RemoteFileCache) -> None:
    digest = hashlib.sha256((web.folder / INDEX_NAME).read_bytes()).hexdigest()
    assert read_first(web, cache, digest)
    with pytest.raises(ConfigError, match=r"its SHA-256 is not 0{64}, as data.digest says"):
        read_first(web, cache, "0" * 64)


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:text/plain,x"])
def test_a_redirect_to_another_scheme_is_refused(web: WebServer, cache: RemoteFileCache, target: str) -> None:
    web.faults[INDEX_NAME].append(f"to {target}")
    with pytest.raises(ConfigError, match=r"index.json: (redirects to .*; allowed: http|.*is not allowed)"):
        read_first(web, cache)


def test_a_redirect_is_followed_but_not_for_ever(web: WebServer, cache: RemoteFileCache) -> None:
    web.faults[INDEX_NAME].append(f"to {web.url('moved.json')}")
    (web.folder / "moved.json").write_bytes((web.folder / INDEX_NAME).read_bytes())
    assert read_first(web, cache) == b"A" * 500
    web.faults[INDEX_NAME].extend([f"to {web.url(INDEX_NAME)}"] * 50)
    with pytest.raises(ConfigError, match=r"index.json: the server answered 302"):
        read_first(web, cache)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"<html>", "not an index of files"),
        (b"[" * 100_000, "not an index of files"),
        ({"files": [{"name": "a", "bytes": "1", "sha256": "0" * 64}]}, "not an index of files"),
        ({"files": []}, "the index has no files"),
        ({"files": [{"name": "../a", "bytes": 1, "sha256": "0" * 64}]}, "points outside the folder; allowed"),
        ({"files": [{"name": "/etc/a", "bytes": 1, "sha256": "0" * 64}]}, "points outside the folder; allowed"),
        ({"files": [{"name": "", "bytes": 1, "sha256": "0" * 64}]}, "points outside the folder; allowed"),
        ({"files": [{"name": "a\nb", "bytes": 1, "sha256": "0" * 64}]}, "not a name; allowed"),
        ({"files": [{"name": "a\\b", "bytes": 1, "sha256": "0" * 64}]}, "not a name; allowed"),
        ({"files": [{"name": "a" * 513, "bytes": 1, "sha256": "0" * 64}]}, "not a name; allowed"),
        ({"files": [{"name": "a", "bytes": -1, "sha256": "0" * 64}]}, "has -1 bytes; allowed"),
        ({"files": [{"name": "a", "bytes": 1 << 40, "sha256": "0" * 64}]}, "bytes; allowed"),
        ({"files": [{"name": "a", "bytes": 1, "sha256": "../../evil"}]}, "sha256 must be 64 of 0-9 and a-f"),
        ({"files": [{"name": "a", "bytes": 1, "sha256": "0" * 64}] * 2}, "is listed twice"),
    ],
)
def test_an_index_that_cannot_be_right_is_explained(
    web: WebServer, cache: RemoteFileCache, index: bytes | dict[str, object], words: str
) -> None:
    (web.folder / INDEX_NAME).write_bytes(index if isinstance(index, bytes) else msgspec.json.encode(index))
    with pytest.raises(ConfigError, match=rf"^data.path.*{words}"):
        read_first(web, cache)


# --- making an index ---------------------------------------------------------------------------------------------


def test_an_index_is_made_by_a_command_and_its_digest_belongs_into_the_run_file(
    web: WebServer, cache: RemoteFileCache, capsys: pytest.CaptureFixture[str]
) -> None:
    (web.folder / ".hidden").write_text("x")
    (web.folder / "new.txt").write_text("x")
    assert main([str(web.folder)]) == 0
    digest = capsys.readouterr().out.removeprefix("digest: ").strip()
    files = remote_files(SourceSection(path=web.url(), digest=digest), "data", cache)
    assert sorted(files) == [FIRST, "001.txt", "002.txt", "new.txt"]
    assert main([]) == main([str(web.folder / FIRST)]) == 2
    assert "usage: python -m peerd.data.files.file_index FOLDER" in capsys.readouterr().err
