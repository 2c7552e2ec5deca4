"""Rows that give no text are left out and counted, the same on every peer, or end the trainer (`data.strict`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from peerd.core.errors import ConfigError
from peerd.data import readers
from peerd.data.skipped_rows import NOTHING_ROWS, RowFaults, SkippedRows
from peerd.data.stream import SampleStream
from peerd.data.text_stream import FilePart
from peerd.data.tokenizer import load_vocabulary
from peerd.run.runfile import DataSection, RunFile, fingerprint

GOOD = [json.dumps({"text": chr(65 + index % 26) * 50}) for index in range(200)]
NAN = '{"text": "' + "n" * 50 + '", "score": NaN}'


def stream(path: Path, **settings: object) -> SampleStream:
    data = DataSection(path=str(path), **({"holdout": 0.0, "shuffle_buffer": 64} | settings))  # type: ignore[arg-type]
    return SampleStream(data, load_vocabulary("bytes"), 8, 1, "me")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": null}', "found null"),
        ('{"body": "x"}', "found the fields body"),
        ('{"text": 5}', "found the fields text"),
        ('{"text": "cut', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("\\xff", "not JSON"),
        ("[1]", "found list"),
    ],
)
def test_a_bad_line_is_left_out_and_counted_once(tmp_path: Path, line: str, words: str) -> None:
    clean, spoilt = tmp_path / "clean.jsonl", tmp_path / "spoilt.jsonl"
    clean.write_text("\n".join(GOOD))
    spoilt.write_text("\n".join([*GOOD[:150], line, *GOOD[150:]]))
    source = stream(spoilt, kind="jsonl")
    per_epoch = 200 * 51 // 8
    assert torch.equal(source.take(3 * per_epoch), stream(clean, kind="jsonl").take(3 * per_epoch))
    assert source.skipped == 1
    (fault,) = source.newest_faults
    assert "spoilt.jsonl, line 151: " in fault
    assert words in fault
    with pytest.raises(ConfigError, match=r"line 151: .* \(data.strict: false leaves such rows out\)"):
        stream(spoilt, kind="jsonl", strict=True).take(per_epoch)


def test_a_stream_that_resumes_among_bad_lines_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    lines = [line if index % 3 else "{" for index, line in enumerate(GOOD)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = stream(tmp_path, kind="jsonl")
    source.take(333)
    later = stream(tmp_path, kind="jsonl")
    later.resume(source.position())
    assert torch.equal(later.take(200), source.take(200))


def test_a_number_that_json_does_not_know_in_another_field_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([NAN] * 9))
    source = stream(tmp_path, kind="jsonl")
    assert source.take(9).eq(ord("n")).any()
    assert source.skipped == 0


def test_a_line_that_is_too_long_is_one_bad_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES", 200)
    (tmp_path / "a.jsonl").write_text("\n".join([GOOD[0], json.dumps({"text": "x" * 1000}), GOOD[1]]))
    found, faults = [], SkippedRows()
    field = readers.Field("text", "data.field")
    for piece in readers.read_jsonl(tmp_path / "a.jsonl", FilePart(), None, field, RowFaults(faults, True)):
        found.append((piece.text[:1], piece.start.line))
    assert found == [(b"A", 0), (b"B", 2)]
    assert faults.count == 1


def test_parquet_rows_without_text_or_with_other_bytes_are_left_out_and_counted(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [b"a" * 40, None, b"\xff\xfe", b"", b"b" * 40]
    column = pyarrow.array(texts, pyarrow.binary()).cast(pyarrow.string(), safe=False)
    for kind in (pyarrow.string(), pyarrow.large_string()):
        parquet.write_table(pyarrow.table({"text": column.cast(kind)}), tmp_path / "a.parquet")
        source = stream(tmp_path / "a.parquet", kind="parquet")
        assert set(source.take(30).flatten().tolist()) == {0, ord("a"), ord("b")}
        assert source.skipped == 2
        assert "a.parquet, row 3: not UTF-8" in source.newest_faults[0]
        with pytest.raises(ConfigError, match=r"row 2: the text is null"):
            stream(tmp_path / "a.parquet", kind="parquet", strict=True)


def test_a_file_of_another_format_is_an_error_after_its_first_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" * (NOTHING_ROWS + 5))
    with pytest.raises(ConfigError, match=f"line {NOTHING_ROWS}: .*; the {NOTHING_ROWS - 1} rows before it cannot"):
        stream(tmp_path, kind="jsonl")
    (tmp_path / "a.jsonl").write_text("{}\n" * 5)
    with pytest.raises(ConfigError, match=r"no train text in the 1 files.*; 5 rows were left out: .*line 1: expected"):
        stream(tmp_path, kind="jsonl")


def test_many_bad_rows_after_a_good_one_end_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([GOOD[0], *["{}"] * (2 * NOTHING_ROWS), GOOD[1]]))
    source = stream(tmp_path, kind="jsonl")
    assert source.take(64).shape == (64, 9)
    assert source.skipped == 2 * NOTHING_ROWS


def test_strict_is_each_peers_own() -> None:
    runs = [RunFile(run="r", data=DataSection(strict=strict)) for strict in (False, True)]
    assert fingerprint(runs[0]) == fingerprint(runs[1])
