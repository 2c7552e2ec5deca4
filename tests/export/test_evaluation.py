"""The loss of an exported model on a file: that of training's validation on the same samples; every token once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from peerd.core.errors import ConfigError
from peerd.data.stream import SampleStream
from peerd.data.tokenizer import load_vocabulary
from peerd.export import evaluation
from peerd.export.evaluation import Evaluation, evaluate
from peerd.export.export import ExportRequest, export
from peerd.export.loaded_model import LoadedModel, load_export
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import DataSection
from tests.kit.exporting import make_run, save_all

TEXT = "The quick brown fox jumps over the lazy dog; größer als π. " * 40


@pytest.fixture
def trained(tmp_path: Path) -> tuple[list[StageModule], LoadedModel]:
    stages = save_all(tmp_path / "peers", make_run(2))
    export(ExportRequest(root=tmp_path / "peers", out=tmp_path / "out"))
    return stages, load_export(tmp_path / "out")


def validation_loss(stages: list[StageModule], samples: torch.Tensor) -> float:
    """As a trainer asks for it: the mean over the samples."""
    x, targets = samples[:, :-1], samples[:, 1:]
    for stage in stages[:-1]:
        x = stage.forward(x)
    return stages[-1].loss(x, targets)


@pytest.mark.parametrize("windows", [1, 7, 64, 130])
def test_the_loss_is_that_of_validation_on_the_same_samples(
    windows: int, tmp_path: Path, trained: tuple[list[StageModule], LoadedModel]
) -> None:
    stages, loaded = trained
    context = loaded.config.context
    file = tmp_path / "text.txt"
    file.write_bytes(TEXT.encode()[: windows * context])  # and the separator: whole windows
    data = DataSection(path=str(file), holdout=0, shuffle_buffer=windows)  # one block: each sample once
    samples = SampleStream(data, load_vocabulary("bytes"), context, 0, "all").take(windows)
    found = evaluate(loaded, file)
    assert found.tokens == found.text_bytes == windows * context
    assert found.loss == pytest.approx(validation_loss(stages, samples), abs=1e-6)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))


def plain_loss(loaded: LoadedModel, tokens: list[int]) -> tuple[float, int]:
    """Window by window, nothing shared with the code under test."""
    context, nats, count = loaded.config.context, 0.0, 0
    for start in range(0, len(tokens) - 1, context):
        window = torch.tensor(tokens[start : start + context + 1])
        logits = loaded.model(window[None, :-1])[0]
        nats += float(F.cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    return nats / count, count


@pytest.mark.parametrize("size", [1, 2, 11, 12, 13, 24, 25, 777])
def test_every_token_but_the_first_is_predicted_once_also_in_a_short_last_window(
    size: int, tmp_path: Path, trained: tuple[list[StageModule], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "LARGEST_BATCH", 3)
    file = tmp_path / "text.txt"
    file.write_bytes(TEXT.encode()[:size])
    loss, count = plain_loss(trained[1], [*TEXT.encode()[:size], 0])
    seen: list[Evaluation] = []
    found = evaluate(trained[1], file, seen.append)
    assert (found.tokens, found.batch) == (count, 3) == (size, 3)
    assert found.loss == pytest.approx(loss, abs=1e-6)
    assert [one.tokens for one in seen] == sorted({one.tokens for one in seen})
    assert seen[-1].tokens == size


def test_lines_of_json_are_documents_with_a_separator_after_each(
    tmp_path: Path, trained: tuple[list[StageModule], LoadedModel]
) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab", "größer", "c" * 40)))
    found = evaluate(trained[1], file)
    tokens = [*b"ab", 0, *"größer".encode(), 0, *b"c" * 40, 0]
    assert found.loss == pytest.approx(plain_loss(trained[1], tokens)[0], abs=1e-6)
    assert (found.tokens, found.text_bytes) == (len(tokens) - 1, len(tokens) - 3)
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / found.text_bytes)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("empty.txt", b"", "has 0 bytes of text: too little to predict a token"),
        ("bad.jsonl", b"{", "line 1: not JSON"),
        ("other.jsonl", b'{"body": "a"}\n', "expected an object with text under 'text'"),
        ("bad.parquet", b"PAR1", "not a Parquet file that can be read"),
    ],
)
def test_a_file_with_nothing_to_measure_is_one_message(
    name: str, content: bytes, told: str, tmp_path: Path, trained: tuple[list[StageModule], LoadedModel]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        evaluate(trained[1], tmp_path / name)
    assert told in str(caught.value)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
