"""Files are fetched ahead and read while they are fetched; no sample is made of bytes that nobody has checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peerd.core.errors import ConfigError
from peerd.data import readers, text_stream
from peerd.data.files import file_index
from peerd.data.files.file_index import INDEX_NAME, make_index
from peerd.data.files.http_fetch import DataUnavailable, HttpFetcher
from peerd.data.files.remote_files import RemoteFileCache, remote_files
from peerd.data.stream import SampleStream
from peerd.data.tokenizer import load_vocabulary
from peerd.run.runfile import DataSection, SourceSection
from tests.worlds.processes.webserver import WebServer, serving

pytestmark = pytest.mark.socket

SIZE, PIECE = 1000, 100
NAMES = ("a", "b", "c")


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """Three texts of ten pieces each, and their index."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(file_index, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(readers, "PIECE_BYTES", 40)
    monkeypatch.setattr(text_stream, "_LOOK_BYTES", 40)
    folder = tmp_path / "served"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_text("".join(f"{name}{number:08d}\n" for number in range(SIZE // 10)))
    (folder / INDEX_NAME).write_bytes(make_index(folder))
    with serving(folder) as server:
        yield server
        server.released.set()


def cache_of(web: WebServer, most: int = 10 * SIZE) -> RemoteFileCache:
    return RemoteFileCache(web.folder.parent / "cache", most, HttpFetcher(pause=lambda seconds: None))


def stream(path: str, cache: RemoteFileCache | None = None, buffer: int = 5) -> SampleStream:
    data = DataSection(path=path, holdout=0.0, shuffle_buffer=buffer)
    return SampleStream(data, load_vocabulary("bytes"), 8, 1, "me", cache=cache)


def local(web: WebServer, buffer: int = 5) -> SampleStream:
    return stream(f"{web.folder}/[abc]", buffer=buffer)


def settled() -> None:
    """Wait until nothing is fetched."""
    for thread in threading.enumerate():
        if thread.name == "peerd fetch":
            thread.join(10.0)
            assert not thread.is_alive()


def asked(web: WebServer) -> list[tuple[str, str]]:
    return [(path, wanted) for path, wanted in web.asked if path != INDEX_NAME]


def test_the_first_samples_come_while_the_file_is_fetched(web: WebServer) -> None:
    for name in NAMES:
        web.faults[name].append(f"hold {3 * PIECE + 1}")
    remote, plain = stream(web.url(), cache_of(web)), local(web)
    assert torch.equal(remote.take(12), plain.take(12))
    assert len(asked(web)) == 1  # the next file waits for its turn on the line
    position = remote.position()
    web.released.set()
    assert torch.equal(remote.take(400), plain.take(400))
    later = stream(web.url(), cache_of(web))
    later.resume(position)
    plain.resume(position)
    assert torch.equal(later.take(100), plain.take(100))


def test_the_next_file_is_fetched_while_this_one_is_read(web: WebServer) -> None:
    cache = cache_of(web, 2 * SIZE)
    source = stream(web.url(), cache)
    settled()
    source.take(40)  # of 111 that a file has
    settled()
    assert len(asked(web)) == 2
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) == 2 * SIZE
    source.take(111)
    settled()
    source.take(40)
    settled()
    assert len(asked(web)) == 3
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) == 2 * SIZE


def test_nothing_is_fetched_ahead_that_would_take_the_place_of_what_is_read(web: WebServer) -> None:
    source = stream(web.url(), cache_of(web, 2 * SIZE - 1))
    settled()
    source.take(40)
    settled()
    assert len(asked(web)) == 1


def test_a_damaged_piece_is_fetched_again_alone_and_never_read(web: WebServer) -> None:
    for name in NAMES:
        web.faults[name].append(f"flip {4 * PIECE + 7}")
    assert torch.equal(stream(web.url(), cache_of(web)).take(300), local(web).take(300))
    ranges = [wanted for _, wanted in asked(web)]
    assert sorted(ranges) == [""] * 3 + [f"bytes={4 * PIECE}-"] * 3


def test_a_server_that_sends_all_again_after_damage_changes_nothing_that_was_checked(web: WebServer) -> None:
    for name in NAMES:
        web.faults[name].extend([f"flip {4 * PIECE}", "all"])
    assert torch.equal(stream(web.url(), cache_of(web)).take(300), local(web).take(300))


def test_a_piece_that_is_damaged_twice_ends_the_trainer(web: WebServer) -> None:
    for name in NAMES:
        web.faults[name].extend([f"flip {4 * PIECE}"] * 2)
    with pytest.raises(ConfigError, match=r"/[abc]: the SHA-256 of the 100 bytes from 400 on is not [0-9a-f]{64}, as"):
        stream(web.url(), cache_of(web)).take(300)
    settled()
    assert not list((web.folder.parent / "cache").iterdir())


def test_samples_stay_the_same_when_a_server_breaks_off_for_good_in_the_middle(web: WebServer) -> None:
    small = cache_of(web, SIZE)  # one file at a time: each is fetched in each epoch
    source, plain, failures = stream(web.url(), small), local(web), 0
    for _ in range(20):
        for name in NAMES:
            web.faults[name].extend(["cut 250", *["503"] * 5])
        expected = plain.take(40)
        while True:
            try:
                assert torch.equal(source.take(40), expected)
                break
            except DataUnavailable:
                failures += 1
        for faults in web.faults.values():
            faults.clear()
    assert failures > 3


def test_a_fetch_that_nobody_wants_any_more_ends_and_leaves_nothing(web: WebServer) -> None:
    for name in NAMES:
        web.faults[name].append("hold 150")
    cache = cache_of(web)
    files = remote_files(SourceSection(path=web.url()), "data", cache)
    cache.folder.mkdir()
    files["a"].fetch_ahead()
    cache.close()
    web.released.set()
    settled()
    assert not list(cache.folder.iterdir())


def test_a_file_that_is_wanted_now_waits_for_none_that_was_to_be_fetched_ahead(web: WebServer) -> None:
    web.faults["a"].append("hold 150")
    cache = cache_of(web, 2 * SIZE)
    files = remote_files(SourceSection(path=web.url()), "data", cache)
    with files["a"].open() as read:
        assert read.read(PIECE) == (web.folder / "a").read_bytes()[:PIECE]
        files["b"].fetch_ahead()  # which waits for the end of `a`
        found: list[bytes] = []

        def read_now() -> None:
            with files["c"].open() as now:
                found.append(now.read())

        reader = threading.Thread(target=read_now)
        reader.start()
        reader.join(10.0)
        waits = reader.is_alive()
        web.released.set()
        reader.join()
    settled()
    assert not waits
    assert found == [(web.folder / "c").read_bytes()]
    assert sorted(path for path, _ in asked(web)) == ["a", "c"]


def test_an_index_without_pieces_serves_and_its_files_are_read_once_they_are_complete(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_index, "PIECE_BYTES", 1 << 20)
    (web.folder / INDEX_NAME).write_bytes(make_index(web.folder))
    assert b"pieces" not in (web.folder / INDEX_NAME).read_bytes()
    assert torch.equal(stream(web.url(), cache_of(web)).take(300), local(web).take(300))
