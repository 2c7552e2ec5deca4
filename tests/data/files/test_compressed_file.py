"""Compressed text is read as text, from any place on; damaged, endless and other files end with one sentence."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zstandard

from peerd.core.errors import ConfigError
from peerd.data import text_stream
from peerd.data.corpus import Corpus
from peerd.data.corpus_digest import check_text
from peerd.data.stream import SampleStream
from peerd.data.tokenizer import load_vocabulary
from peerd.run.runfile import DataSection, ModelSection, RunFile, sources_of

Compress = Callable[[bytes], bytes]
FORMATS: dict[str, Compress] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}
LINES = [f"line {number} \u00e4\u00f6\u00fc\n".encode() for number in range(20_000)]
TEXT = b"".join(LINES)


def section(path: Path, **settings: object) -> DataSection:
    return DataSection(path=str(path), **({"holdout": 0.0, "shuffle_buffer": 64} | settings))  # type: ignore[arg-type]


def stream(path: Path, **settings: object) -> SampleStream:
    return SampleStream(section(path, **settings), load_vocabulary("bytes"), 8, 1, "me")


def pieces_of(path: Path, split: str = "train", **settings: object) -> list[bytes]:
    data = section(path, **settings)
    (key, source), *_ = sources_of(data)
    corpus = Corpus(source, data.holdout, split, key)  # type: ignore[arg-type]
    found = [piece for file in corpus.files for piece in corpus.read(file)]
    for index in range(0, len(found), 1 + len(found) // 7):  # from each cursor on
        assert list(corpus.read(corpus.files[0], found[index].start)) == found[index:]
    assert all(isinstance(piece.text, bytes) for piece in found)
    assert not found or found[-1].ends
    return [bytes(piece.text) for piece in found]


@pytest.mark.parametrize("name", FORMATS)
def test_samples_are_those_of_the_plain_text(tmp_path: Path, name: str) -> None:
    for folder, text in (("plain", TEXT), ("packed", FORMATS[name](TEXT))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text").write_bytes(text)
    plain, packed = stream(tmp_path / "plain"), stream(tmp_path / "packed")
    assert torch.equal(plain.take(500), packed.take(500))
    later = stream(tmp_path / "packed")
    later.resume(packed.position())
    assert torch.equal(later.take(500), plain.take(500))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("padding", [b"", b"\0" * 12])
def test_files_one_after_the_other_are_one_text(tmp_path: Path, name: str, padding: bytes) -> None:
    cut = len(TEXT) // 3
    (tmp_path / "a").write_bytes(FORMATS[name](TEXT[:cut]) + padding + FORMATS[name](TEXT[cut:]) + padding)
    assert b"".join(pieces_of(tmp_path / "a")) == TEXT


@pytest.mark.parametrize("kind", ["text", "jsonl"])
@pytest.mark.parametrize("holdout", [0.00001, 0.02, 0.3])
def test_each_byte_of_a_compressed_text_is_either_held_out_or_not(
    tmp_path: Path, kind: str, holdout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_stream, "_LONGEST_SPAN", 1 << 16)
    text = TEXT if kind == "text" else b"".join(b'{"text": "%05d"}\n' % number for number in range(20_000))
    (tmp_path / "a").write_bytes(gzip.compress(text))
    train, valid = (pieces_of(tmp_path / "a", split, kind=kind, holdout=holdout) for split in ("train", "valid"))
    size = len(text) if kind == "text" else 5 * 20_000
    assert sum(map(len, train)) + sum(map(len, valid)) == size
    assert sum(map(len, valid)) / size == pytest.approx(holdout, rel=0.2, abs=0.001)
    if kind == "jsonl":
        assert sorted([*train, *valid]) == [b"%05d" % number for number in range(20_000)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cut", [1, 1000])
def test_a_file_that_breaks_off_is_named(tmp_path: Path, name: str, cut: int) -> None:
    (tmp_path / "a").write_bytes(FORMATS[name](TEXT)[:-cut])
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/a: its {name} data ends early; the file is truncated"):
        pieces_of(tmp_path / "a")


@pytest.mark.parametrize("name", FORMATS)
def test_what_follows_and_is_no_such_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_bytes(FORMATS[name](TEXT) + b"not compressed")
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/a: its {name} data cannot be read: "):
        pieces_of(tmp_path / "a")


@pytest.mark.parametrize("name", FORMATS)
def test_memory_stays_bounded_however_much_comes_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "a").write_bytes(FORMATS[name](b" " * ((300 if name == "zstd" else 50) << 20)))
    tracemalloc.start()
    stream(tmp_path / "a").take(30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < (180e6 if name == "zstd" else 20e6)


def test_a_window_that_is_too_large_is_refused(tmp_path: Path) -> None:
    settings = zstandard.ZstdCompressionParameters(window_log=29, write_content_size=0)
    packed = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    (tmp_path / "a").write_bytes(packed.compress(TEXT) + packed.flush())
    with pytest.raises(ConfigError, match=r"a: its zstd data cannot be read: .*memory"):
        stream(tmp_path / "a")


@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (b"PK\x03\x04rest", "a zip archive"),
        (b"\x04\x22\x4d\x18rest", "compressed by lz4"),
        ("text".encode("utf-16"), "UTF-16"),
        (b"text \0 text", "binary: it has bytes of value 0"),
        (b"\x93NUMPY\x01\x00v\x00", "a NumPy array"),
        (gzip.compress(b"in a tar \0\0\0 archive", mtime=0), "binary: it has bytes of value 0"),
    ],
)
def test_a_file_that_is_not_text_is_named_before_anything_is_joined(tmp_path: Path, begin: bytes, what: str) -> None:
    for index in range(3):
        (tmp_path / f"{index}.txt").write_bytes(TEXT)
    (tmp_path / "2.txt").write_bytes(begin)
    data = section(tmp_path, holdout=0.02)
    with pytest.raises(ConfigError, match=rf"/2.txt: is not a text file \({re.escape(what)}.*; allowed: UTF-8 text,"):
        check_text(RunFile(run="r", model=ModelSection(context=8), data=data))
