"""The stream of samples: complete, shuffled, bounded, resumable; every file that cannot serve is named."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from peerd.core.errors import ConfigError
from peerd.data.corpus import FEW_FILES, Corpus, find_files
from peerd.data.readers import PIECE_BYTES
from peerd.data.stream import SampleStream
from peerd.data.tokenizer import load_vocabulary
from peerd.run.runfile import DataSection, sources_of

CONTEXT = 8
BYTES = load_vocabulary("bytes")


def section(path: Path | str, **settings: object) -> DataSection:
    return DataSection(path=str(path), **({"holdout": 0.0, "shuffle_buffer": 64} | settings))  # type: ignore[arg-type]


def stream(
    data: DataSection, peer: str = "me", split: str = "train", seed: int = 1, vocab: str = "bytes"
) -> SampleStream:
    return SampleStream(data, load_vocabulary(vocab), CONTEXT, seed, peer, split)  # type: ignore[arg-type]


def corpus_of(data: DataSection, split: str = "train") -> Corpus:
    (key, source), *_ = sources_of(data)
    return Corpus(source, data.holdout, split, key)  # type: ignore[arg-type]


def write_texts(folder: Path, count: int, letters: int = 100) -> None:
    """`count` files; each consists of one character over and over, and no two of the same."""
    for index in range(count):
        (folder / f"{index:03d}.txt").write_bytes(bytes([index + 1]) * letters)


def text_of(rows: Iterable[torch.Tensor]) -> list[str]:
    return [bytes(row.tolist()).decode() for row in rows]


def test_samples_are_context_plus_one_tokens_and_overlap_by_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 201)))
    samples = stream(section(tmp_path, shuffle_buffer=25)).take(25)
    assert (samples.shape, samples.dtype) == ((25, CONTEXT + 1), torch.int64)
    starts = sorted(int(row[0]) for row in samples)
    assert starts == [1 + CONTEXT * number for number in range(25)]


def test_the_place_of_each_sample_in_the_data_is_known(tmp_path: Path) -> None:
    write_texts(tmp_path, 5, letters=100)
    source = stream(section(tmp_path, shuffle_buffer=40))
    rows = source.take(30)
    assert len(source.origins) == 30
    for row, origin in zip(rows, source.origins, strict=True):
        name, piece, token = origin.split(", ")
        text = Path(name).read_bytes()
        assert piece == "text at 0"
        assert int(row[0]) == [*text, load_vocabulary("bytes").separator][int(token.removeprefix("token "))]


def test_each_epoch_has_every_token_once_and_the_stream_never_ends(tmp_path: Path) -> None:
    write_texts(tmp_path, 5, letters=63)  # with its separator a file is 8 samples long
    source = stream(section(tmp_path, shuffle_buffer=40))
    for _ in range(3):
        counts = Counter(source.take(40)[:, :-1].flatten().tolist())
        assert counts == {0: 5} | {index + 1: 63 for index in range(5)}


def test_samples_are_shuffled_and_peers_read_in_different_orders(tmp_path: Path) -> None:
    write_texts(tmp_path, 60)
    data = section(tmp_path, shuffle_buffer=200)
    mine, again, other = (stream(data, peer).take(300) for peer in ("me", "me", "you"))
    assert torch.equal(mine, again)
    assert not torch.equal(mine, other)
    assert not torch.equal(mine, stream(data, seed=2).take(300))
    neighbours = (mine[1:, 4] == mine[:-1, 4]).float().mean()
    assert neighbours < 0.2  # in the files' order nearly all neighbours are of one file


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
@pytest.mark.parametrize("taken", [0, 1, 7, 63, 64, 65, 200, 1000])
def test_a_resumed_stream_goes_on_with_the_same_samples(tmp_path: Path, kind: str, taken: int) -> None:
    texts = [chr(65 + index % 60) * (5 + 37 * index % 200) for index in range(40)]
    write_documents(tmp_path, kind, texts, rows_per_group=7)
    data = section(tmp_path / "*", kind=kind)
    source = stream(data)
    source.take(taken)
    position = json.loads(json.dumps(source.position()))
    assert len(json.dumps(position)) < 200
    expected = source.take(150)
    later = stream(data)
    later.resume(position)
    assert later.position() == position
    assert torch.equal(later.take(150), expected)


def write_documents(folder: Path, kind: str, texts: list[str], rows_per_group: int = 1000) -> None:
    if kind == "text":
        for index, text in enumerate(texts):
            (folder / f"{index:03d}.txt").write_text(text)
    elif kind == "jsonl":
        for part in range(2):
            lines = [json.dumps({"id": 1, "text": text}) for text in texts[part::2]]
            (folder / f"{part}.jsonl").write_text("\n".join([*lines, ""]))
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"text": texts, "id": list(range(len(texts)))})
        parquet.write_table(table, folder / "0.parquet", row_group_size=rows_per_group)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_documents_of_every_kind_of_file_are_read_whole(tmp_path: Path, kind: str) -> None:
    texts = ["first ä€😀 document", "second\nwith lines", "third"]
    write_documents(tmp_path, kind, texts)
    data = section(tmp_path / "*", kind=kind)
    corpus = corpus_of(data)
    found = [piece.text.decode() for file in corpus.files for piece in corpus.read(file)]
    assert sorted(found) == sorted(texts)
    assert all(piece.ends for file in corpus.files for piece in corpus.read(file))


def test_a_large_text_is_read_in_pieces_that_end_with_a_line(tmp_path: Path) -> None:
    text = "".join(f"line {number} äöü\n" for number in range(20_000))
    (tmp_path / "a.txt").write_text(text)
    corpus = corpus_of(section(tmp_path))
    pieces = list(corpus.read(corpus.files[0]))
    assert b"".join(piece.text for piece in pieces).decode() == text
    assert all(len(piece.text) <= PIECE_BYTES and piece.text.endswith(b"\n") for piece in pieces)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert list(corpus.read(corpus.files[0], pieces[2].start)) == pieces[2:]


@pytest.mark.parametrize("letter", ["a", "ä", "€", "😀"])
@pytest.mark.parametrize("shift", range(4))
def test_a_text_without_spaces_is_never_cut_inside_a_character(tmp_path: Path, letter: str, shift: int) -> None:
    text = "x" * shift + letter * (2 * PIECE_BYTES // len(letter.encode()))
    (tmp_path / "a.txt").write_text(text)
    corpus = corpus_of(section(tmp_path))
    assert "".join(piece.text.decode() for piece in corpus.read(corpus.files[0])) == text


# --- which files, and what is held out ---------------------------------------------------------------------------


def test_a_path_may_be_a_file_a_folder_a_glob_or_several(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "b.md", "sub/c.txt"):
        (tmp_path / name).write_text("x")
    found = {
        pattern: list(find_files(pattern))
        for pattern in (
            f"{tmp_path}/a.txt",
            f"{tmp_path}",
            f"{tmp_path}/**/*.txt",
            f"{tmp_path}/*.md, {tmp_path}/sub/*",
        )
    }
    assert list(found.values()) == [
        ["a.txt"],
        ["a.txt", "b.md", "sub/c.txt"],
        ["a.txt", "sub/c.txt"],
        ["b.md", "sub/c.txt"],
    ]


def test_the_standard_library_is_there_without_its_tests(tmp_path: Path) -> None:
    files = find_files("stdlib")
    assert {"json/decoder.py", "asyncio/tasks.py"} < files.keys()
    assert not [name for name in files if "/test" in name or "site-packages" in name]


def test_many_files_are_held_out_whole_wherever_the_folder_is(tmp_path: Path) -> None:
    names: dict[str, list[set[str]]] = {"train": [], "valid": []}
    for folder in (tmp_path / "here", tmp_path / "there"):
        folder.mkdir()
        write_texts(folder, 4 * FEW_FILES)
        for split, found in names.items():
            found.append({file.name for file in corpus_of(section(folder, holdout=0.2), split).files})
    assert names["train"][0] == names["train"][1]
    assert not names["train"][0] & names["valid"][0]
    assert len(names["train"][0] | names["valid"][0]) == 4 * FEW_FILES
    assert 0.1 < len(names["valid"][0]) / (4 * FEW_FILES) < 0.3


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_of_few_files_the_last_part_is_held_out(tmp_path: Path, kind: str) -> None:
    texts = [f"{number:03d}" * 20 for number in range(100)]
    if kind == "text":
        (tmp_path / "one.txt").write_text("\n".join(texts))
    else:
        write_documents(tmp_path, kind, texts)
    data = section(tmp_path / "*", kind=kind, holdout=0.25)
    parts = []
    for split in ("train", "valid"):
        corpus = corpus_of(data, split)
        parts.append("\n".join(piece.text.decode() for file in corpus.files for piece in corpus.read(file)))
    assert all(sum(text in part for part in parts) <= 1 for text in texts)
    assert sum(text in parts[0] for text in texts) == pytest.approx(75, abs=3)
    assert sum(text in parts[1] for text in texts) == pytest.approx(25, abs=3)
    assert stream(data, split="valid").take(3).shape == (3, CONTEXT + 1)


# --- what can be wrong -------------------------------------------------------------------------------------------


def test_no_file_at_all_is_a_config_error_that_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path .*nothing/\*\.txt: no file matches \(looked from "):
        stream(section(tmp_path / "nothing" / "*.txt"))


def test_files_without_text_are_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(ConfigError, match="no train text in the 1 files that were read"):
        stream(section(tmp_path))


def test_validation_without_a_holdout_is_a_config_error(tmp_path: Path) -> None:
    write_texts(tmp_path, 2)
    with pytest.raises(ConfigError, match="holdout is 0"):
        stream(section(tmp_path), split="valid")
    write_texts(tmp_path, FEW_FILES)
    with pytest.raises(ConfigError, match=r"data.holdout 1e-09 leaves no file of .* for valid data"):
        stream(section(tmp_path, holdout=1e-9), split="valid")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "cut', "not JSON"),
        ("[1, 2]", "expected an object with text under 'text' .*, found list"),
        ('{"body": "x", "id": 1}', "expected an object with text under 'text' .*, found the fields body, id"),
        ('{"text": 5}', "expected an object with text under 'text'"),
    ],
)
def test_a_bad_jsonl_line_is_named_by_file_and_number(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=rf"a\.jsonl, line 3: {words}"):
        stream(section(tmp_path, kind="jsonl", strict=True))


def test_a_parquet_file_that_cannot_serve_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_documents(tmp_path, "parquet", ["x"])
    with pytest.raises(ConfigError, match=r"0\.parquet: no column 'body' \(data.field\); there are text, id"):
        stream(section(tmp_path, kind="parquet", field="body"))
    with pytest.raises(ConfigError, match=r"0\.parquet: column 'id' \(data.field\) contains int64, not text"):
        stream(section(tmp_path, kind="parquet", field="id"))
    (tmp_path / "0.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match=r"0\.parquet: not a Parquet file"):
        stream(section(tmp_path, kind="parquet"))


def test_a_file_that_goes_away_is_named(tmp_path: Path) -> None:
    write_texts(tmp_path, 3)
    source = stream(section(tmp_path))
    (tmp_path / "001.txt").unlink()
    with pytest.raises(ConfigError, match=r"001\.txt: cannot be read: No such file"):
        source.take(500)


@pytest.mark.parametrize(
    "position",
    [
        {},
        {"block": 0, "size": 10, "taken": 11, "place": [0, 0, None, 0]},
        {"block": 0, "size": 10, "taken": 1, "place": [0, 99, None, 0]},
        {"block": "0", "size": 10, "taken": 1, "place": [0, 0, None, 0]},
    ],
)
def test_a_position_of_something_else_is_a_config_error(tmp_path: Path, position: dict[str, object]) -> None:
    write_texts(tmp_path, 3)
    with pytest.raises(ConfigError, match="position of a sample stream"):
        stream(section(tmp_path)).resume(position)


@pytest.mark.parametrize("package", ["pyarrow", "tokenizers"])
def test_a_missing_optional_package_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "vocab.json").write_text("{}")
    write_texts(tmp_path, 1)
    kind, vocab = ("parquet", "bytes") if package == "pyarrow" else ("text", str(tmp_path / "vocab.json"))
    with pytest.raises(ConfigError, match=rf"needs the {package} package: pip install 'peerd\[data\]'"):
        stream(section(tmp_path, kind=kind), vocab=vocab)


# --- vocabularies ------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    corpus = ["the quick brown fox jumps over the lazy dog\n" * 50, "ä€😀 " * 20]
    tokenizer.train_from_iterator(corpus, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    file = tmp_path / "vocab.json"
    tokenizer.save(str(file))
    return file


def test_a_tokenizers_file_encodes_and_decodes(tokenizer_file: Path) -> None:
    vocab = load_vocabulary(str(tokenizer_file))
    text = "the lazy dog ä€😀\njumps"
    tokens = vocab.encode(text.encode()).tolist()
    assert len(tokens) < len(text.encode())
    assert max(tokens) < vocab.size
    assert vocab.decode(tokens) == text
    assert vocab.separator is not None
    assert vocab.decode([*tokens, vocab.separator, *tokens]) == f"{text}\n{text}"


def test_samples_of_a_tokenizers_file_cover_the_text_and_resume(tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for index in range(8):
        (tmp_path / "text" / f"{index}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * (40 + index))
    data = section(tmp_path / "text")
    source = stream(data, vocab=str(tokenizer_file))
    source.take(100)
    position = source.position()
    expected = source.take(50)
    assert "quick brown" in load_vocabulary(str(tokenizer_file)).decode(expected.flatten().tolist())
    later = stream(data, vocab=str(tokenizer_file))
    later.resume(position)
    assert torch.equal(later.take(50), expected)


def test_a_tokenizers_own_truncation_and_padding_do_not_apply(tokenizer_file: Path) -> None:
    text = b"the lazy dog jumps over the quick brown fox\n" * 100
    expected = load_vocabulary(str(tokenizer_file)).encode(text).tolist()
    for name, settings in (("truncation", {"max_length": 16}), ("padding", {"length": 1 << 14})):
        tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(tokenizer_file))
        getattr(tokenizer, f"enable_{name}")(**settings)
        bounded = tokenizer_file.with_name(f"{name}.json")
        tokenizer.save(str(bounded))
        assert load_vocabulary(str(bounded)).encode(text).tolist() == expected
        assert len(tokenizer.encode(text.decode()).ids) != len(expected)


def test_a_tokenizer_without_an_unknown_token_is_named_with_the_text(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "words.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"known": 0})).save(str(file))
    with pytest.raises(ConfigError, match=r"^model.vocab: .*words.json cannot encode the text: .*UNK.*'other'"):
        load_vocabulary(str(file)).encode(b"other")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot read .*: No such file"), ("{", "is not a JSON file"), ('{"a": 1}', "is not a tokenizers file")],
)
def test_a_vocabulary_that_cannot_be_read_is_explained(tmp_path: Path, content: str | None, words: str) -> None:
    pytest.importorskip("tokenizers")
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"model.vocab: .*{words}"):
        load_vocabulary(str(file))


def test_bytes_decode_what_they_encode_and_separators_become_line_ends() -> None:
    text = "def f():\n\treturn 'ä€😀'"
    assert BYTES.decode(BYTES.encode(text.encode()).tolist()) == text
    assert BYTES.decode([65, 0, 66, 255]) == "A\nB\ufffd"


@pytest.mark.slow
def test_memory_stays_bounded_however_many_samples_are_taken() -> None:
    import tracemalloc

    data = DataSection()
    tracemalloc.start()
    source = SampleStream(data, BYTES, 128, 0, "me")
    for _ in range(1000):
        source.take(30)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 15e6
