"""An exported folder as it is read: text in whole characters as it comes, and nothing taken on trust."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # type: ignore[import-untyped, unused-ignore]

from peerd.core.errors import ConfigError
from peerd.data.tokenizer import ByteTokenizer, FileTokenizer
from peerd.export.export import ExportRequest, export
from peerd.export.loaded_model import SamplingOptions, TextPieces, Uncached, load_export, write_text
from peerd.model.stage.partition import whole_model
from tests.kit.exporting import make_run, save_all


@pytest.mark.slow
def test_text_from_a_model_repeats_with_its_seed_and_has_no_separator() -> None:
    vocab = ByteTokenizer()
    model = Uncached(whole_model(make_run()), 12, vocab.separator)

    def text(**style: float) -> str:
        return "".join(write_text(model, vocab, "import ", 30, SamplingOptions(**style)))  # type: ignore[arg-type]

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    assert text(seed=1, temperature=0.0) == text(seed=2, temperature=0.0) == text(top_k=1)
    assert "\0" not in text(top_k=0, temperature=5.0)
    assert "".join(write_text(model, vocab, "", 3)) != ""


@given(st.one_of(st.text().map(str.encode), st.binary()))
def test_pieces_of_bytes_are_whole_characters_and_add_up_to_the_text(raw: bytes) -> None:
    vocab, tokens = ByteTokenizer(), [byte for byte in raw if byte]  # the separator is never drawn
    pieces = TextPieces(vocab)
    shown = [pieces.feed(token) for token in tokens]
    assert "".join([*shown, pieces.end()]) == vocab.decode(tokens)
    replaced = "\N{REPLACEMENT CHARACTER}".encode()
    if raw.decode("utf-8", "ignore").encode() == raw:  # valid: nothing is replaced
        assert "".join(shown).encode().count(replaced) == raw.count(replaced)


BYTE_LEVEL = Tokenizer(models.BPE({char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
BYTE_LEVEL.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTE_LEVEL.decoder = decoders.ByteLevel()


@given(st.text(max_size=20))
def test_pieces_of_a_tokenizers_text_add_up_and_wait_for_whole_characters(text: str) -> None:
    vocab = FileTokenizer(BYTE_LEVEL, "vocab.json")
    tokens = [int(token) for token in vocab.encode(text.encode(errors="replace"))]
    pieces = TextPieces(vocab)
    shown = [pieces.feed(token) for token in tokens]
    assert "".join([*shown, pieces.end()]) == vocab.decode(tokens)
    plain = text.encode(errors="replace").decode()
    assert "".join(shown) == plain or plain.endswith("\N{REPLACEMENT CHARACTER}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_all(tmp_path / "peers", make_run(2))
    export(ExportRequest(root=tmp_path / "peers", out=tmp_path / "out"))
    return tmp_path / "out"


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_export(folder)
    told = str(caught.value)
    assert str(folder) in told
    assert "\n" not in told
    return told


def test_what_is_no_export_is_told_so(tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "nowhere")
    (tmp_path / "out").mkdir()
    assert "is not an exported model: it has no config.json" in refusal(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert "does not describe an exported model" in refusal(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_bytes(b"\xff{")
    assert "config.json is damaged" in refusal(tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("format", "peerd-export-9", "has format 'peerd-export-9'; this peerd reads peerd-export-1"),
        ("heads", 3, "d_model 16 and heads 3 do not fit"),
        ("heads", 0, "do not fit"),
        ("heads", 16, "do not fit"),
        ("context", 0, "context is 0"),
        ("vocab_size", 300, "but the tokens are bytes"),
        ("separator", 256, "separator is not in the vocabulary"),
        ("repeats", [1, 1, 0, 1], "repeats are not 1 to 10000 layers"),
        ("repeats", [10**9], "repeats are not 1 to 10000 layers"),
        ("repeats", [1], "blocks.1.attn.out.weight has shape [16, 16]; the model has no such parameter"),
        ("repeats", [1] * 5, "blocks.4.attn.out.weight is missing"),
        ("d_feed", 32, "mlp.down.weight has shape [16, 48]; the model has shape [16, 32]"),
        ("dtype", "float64", "is float32, but config.json says float64"),
        ("dtype", "float16", "does not describe an exported model"),
        ("tokenizer", "../../etc/passwd", "does not describe an exported model"),
        ("tokenizer", "tokenizer.json", "cannot read"),
        ("kind", "os:system", "is a user's own model (os:system); add --model FILE"),
    ],
)
def test_a_changed_config_is_one_message_and_loads_nothing(key: str, value: object, told: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    assert told in refusal(folder)


def test_damaged_or_missing_weights_are_one_message(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (whole[:-4], b"", b"\xff" * 100, whole[:8] + b"[" + whole[9:]):
        weights.write_bytes(broken)
        assert "model.safetensors is damaged" in refusal(folder)
    weights.unlink()
    assert "model.safetensors is missing" in refusal(folder)


def test_code_in_the_folder_is_never_run(folder: Path) -> None:
    before = load_export(folder).model(torch.tensor([[1, 2]]))
    (folder / "model.py").write_text("raise SystemExit('it was run')")
    assert torch.equal(load_export(folder).model(torch.tensor([[1, 2]])), before)


def test_weights_changed_elsewhere_are_taken(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["head.weight"].zero_()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    assert not load_export(folder).model(torch.tensor([[1, 2]])).any()
