"""Digests of what trainers read, and text that is missing or too short, found before anything is joined."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from peerd.core.errors import ConfigError
from peerd.data import corpus_digest
from peerd.data.corpus import FEW_FILES
from peerd.data.corpus_digest import FileDigests, Interrupted, check_text, corpus_digests
from peerd.data.files import file_index
from peerd.data.files.file_index import make_index
from peerd.data.files.remote_files import RemoteFileCache
from peerd.run.runfile import DataSection, EvaluateSection, ModelSection, RunFile, SourceSection

TEXT = "some text to read\n" * 40


def digests_of(folder: Path, memory: Path | None = None, **data: object) -> dict[str, str]:
    run = RunFile(run="r", data=DataSection(**({"path": str(folder)} | data)))  # type: ignore[arg-type]
    return corpus_digests(run, RemoteFileCache(folder / "cache"), FileDigests(memory))


def folder_of(base: Path, texts: dict[str, str]) -> Path:
    base.mkdir()
    for name, text in texts.items():
        (base / name).write_text(text)
    return base


def test_of_few_files_the_text_counts_and_not_its_place_or_name(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", {"a.txt": TEXT, "b.txt": "more"})
    same = folder_of(tmp_path / "same", {"x.txt": "more", "y.txt": TEXT})
    other = folder_of(tmp_path / "other", {"a.txt": TEXT, "b.txt": "less"})
    assert digests_of(one) == digests_of(same) != digests_of(other)
    alone = digests_of(one, path=str(one / "a.txt"))
    assert alone == {"data": hashlib.sha256(TEXT.encode()).hexdigest()}


def test_of_many_files_names_count_since_whole_ones_are_held_out_by_name(tmp_path: Path) -> None:
    texts = {f"{i}.txt": f"{i}" for i in range(FEW_FILES)}
    one = folder_of(tmp_path / "one", texts)
    same = folder_of(tmp_path / "same", texts)
    other = folder_of(tmp_path / "other", {f"n{name}": text for name, text in texts.items()})
    assert digests_of(one) == digests_of(same) != digests_of(other)


def test_a_digest_in_the_run_file_is_that_of_the_text_or_of_its_index(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "text", {"a.txt": TEXT, "b.txt": "more"})
    text, index = digests_of(folder)["data"], hashlib.sha256(make_index(folder)).hexdigest()
    assert digests_of(folder, digest=text) == digests_of(folder, digest=index) == {"data": text}
    with pytest.raises(ConfigError, match=f"is not the text of the run .sha256 {text[:12]}... here, abababababab"):
        digests_of(folder, digest="ab" * 32)
    assert digests_of(folder, digest="any") == {}


def test_several_sources_have_a_digest_each(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "text", {"a.txt": TEXT})
    sources = [SourceSection(path=str(folder)), SourceSection(path="stdlib"), SourceSection(path="x", digest="any")]
    found = digests_of(folder, path="stdlib", sources=sources)
    assert sorted(found) == ["data.sources[0]", "data.sources[1]"]


def test_a_file_is_read_through_once(tmp_path: Path) -> None:
    folder, memory = folder_of(tmp_path / "text", {"a.txt": TEXT}), tmp_path / "memory" / "digests.json"
    found, file = digests_of(folder, memory), folder / "a.txt"
    about = file.stat()
    file.write_text(TEXT.swapcase())
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert digests_of(folder, memory) == found  # as remembered: nobody changes a file so
    file.write_text(TEXT + "more")
    assert digests_of(folder, memory) != found  # changed: read anew


@pytest.mark.parametrize("at", [0, 70, -5])
def test_a_memory_that_a_failing_disk_has_changed_is_made_anew(tmp_path: Path, at: int) -> None:
    folder, memory = folder_of(tmp_path / "text", {"a.txt": TEXT}), tmp_path / "memory" / "digests.json"
    found = digests_of(folder, memory)
    kept = bytearray(memory.read_bytes())
    kept[at] ^= 1
    memory.write_bytes(kept)
    assert digests_of(folder, memory) == found
    memory.write_text("[not json")
    assert digests_of(folder, memory) == found


def test_whoever_does_not_want_it_any_more_ends_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(Interrupted):
        FileDigests(None, lambda: False).of(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("text", "data", "words"),
    [
        (None, {}, "data.path {path}: no file matches (looked from "),
        (
            "12345",
            {},
            "data.path: {path} has 5 bytes to train with in 1 files; one sample of model.context (32) takes",
        ),
        ("", {}, "data.path: {path} has 0 bytes to train with"),
        (
            TEXT,
            {"holdout": 0.001},
            "data.path: {path} leaves nothing to evaluate with: data.holdout (0.001) of it",
        ),
        (TEXT, {"holdout": 0.0}, "data.holdout is 0: there is no text to validate on"),
    ],
)
def test_text_that_cannot_serve_is_found_at_once(
    tmp_path: Path, text: str | None, data: dict[str, object], words: str
) -> None:
    path = tmp_path / "a.txt"
    if text is not None:
        path.write_text(text)
    section = DataSection(path=str(path), **data)  # type: ignore[arg-type]
    run = RunFile(run="r", model=ModelSection(context=32), data=section)
    with pytest.raises(ConfigError, match=re.escape(words.format(path=path))):
        check_text(run)


def test_text_that_is_just_enough_passes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 32)  # and the separator
    never = EvaluateSection(every_steps=0)
    data = DataSection(path=str(tmp_path / "a.txt"), holdout=0.0)
    check_text(RunFile(run="r", model=ModelSection(context=32), data=data, evaluate=never))
    check_text(RunFile(run="r"))  # Python's own sources


def test_an_index_with_pieces_is_known_again_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_index, "PIECE_BYTES", 100)
    folder, memory = (
        folder_of(tmp_path / "text", {"a.txt": TEXT, "b.txt": "more"}),
        tmp_path / "memory" / "digests.json",
    )
    raw = make_index(folder)
    assert b"pieces" in raw
    index = hashlib.sha256(raw).hexdigest()
    assert digests_of(folder, memory, digest=index) == digests_of(folder)
    monkeypatch.setattr(corpus_digest, "with_pieces", None)
    assert digests_of(folder, memory, digest=index) == digests_of(folder)


def test_text_that_is_not_remembered_and_large_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, memory = folder_of(tmp_path / "text", {"a.txt": TEXT}), tmp_path / "memory" / "digests.json"
    run = RunFile(run="r", data=DataSection(path=str(folder)))
    assert not corpus_digest.takes_long(run, FileDigests(memory))
    monkeypatch.setattr(corpus_digest, "PROMPT_BYTES", len(TEXT) - 1)
    assert corpus_digest.takes_long(run, FileDigests(memory))
    named = RunFile(run="r", data=DataSection(path=str(folder), digest="ab" * 32))
    assert not corpus_digest.takes_long(named, FileDigests(memory)), "another text is refused before it contributes"
    digests_of(folder, memory)
    assert not corpus_digest.takes_long(run, FileDigests(memory))
