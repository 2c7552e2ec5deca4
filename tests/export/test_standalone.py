"""The exported model without peerd: its own torch file computes what the stages compute, and writes the same text."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-untyped, unused-ignore]

from peerd.export.export import ExportRequest, export
from peerd.export.loaded_model import SamplingOptions, load_export, write_text
from peerd.export.standalone import GPT, generate
from peerd.run.runfile import RunFile
from tests.kit.amount import few
from tests.kit.exporting import Alone, logits, make_run, save_all

RUNS = {
    "one stage": make_run(),
    "two stages": make_run(2),
    "shared layers": make_run(2, layers=5, share_layers=True),
    "float64": make_run(2, dtype="float64"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_torch_file_alone_gives_the_logits_and_the_text_that_peerd_gives(
    name: str, tmp_path: Path, alone: Alone
) -> None:
    run = RUNS[name]
    stages = save_all(tmp_path / "peers", run)
    export(ExportRequest(root=tmp_path / "peers", out=tmp_path / "out"))
    tokens = torch.randint(0, 256, (3, run.model.context))
    expected = logits(stages, tokens)
    found, text = alone(tmp_path / "out", tokens)
    furthest = float((found - expected.double()).abs().max())
    print(f"{name}: furthest logit {furthest:.1e} of {float(expected.abs().max()):.1f}")
    assert furthest <= (1e-12 if run.model.dtype == "float64" else 1e-6) * max(1.0, float(expected.abs().max()))
    loaded = load_export(tmp_path / "out")
    assert torch.equal(loaded.model(tokens), found.to(expected.dtype))
    style = SamplingOptions(temperature=0.9, top_k=20, seed=4)
    assert text == "".join(write_text(loaded.model, loaded.vocab, "ab ba", 30, style))


def vocabulary(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(["<eos>", "ab", "ba", "é", "?"])}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(1)  # applies nowhere
    path = folder / "words.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.slow
def test_a_tokenizer_comes_along_and_the_torch_file_uses_it(tmp_path: Path, alone: Alone) -> None:
    run = make_run(vocab=str(vocabulary(tmp_path)))
    stages = save_all(tmp_path / "peers", run)
    (tmp_path / "words.json").unlink()  # the copy beside the checkpoints is enough
    export(ExportRequest(root=tmp_path / "peers", out=tmp_path / "out"))
    tokens = torch.randint(0, 5, (2, 9))
    found, text = alone(tmp_path / "out", tokens)
    assert torch.equal(found.float(), logits(stages, tokens))
    loaded = load_export(tmp_path / "out")
    style = SamplingOptions(temperature=0.9, top_k=20, seed=4)
    assert text == "".join(write_text(loaded.model, loaded.vocab, "ab ba", 30, style))
    assert set(text.split()) <= {"ab", "ba", "é", "?"}


class WithoutCache:
    """The model, computing its whole window for each token."""

    def __init__(self, model: GPT) -> None:
        self.context, self.separator, self.parameters, self._model = (
            model.context,
            model.separator,
            model.parameters,
            model,
        )

    def __call__(self, tokens: torch.Tensor, cache: object) -> torch.Tensor:
        self.seen = tokens.shape[1]
        out: torch.Tensor = self._model(tokens)
        return out


def exported(run: RunFile, folder: Path) -> GPT:
    save_all(folder / "peers", run)
    export(ExportRequest(root=folder / "peers", out=folder / "out"))
    model = load_export(folder / "out").model
    assert isinstance(model, GPT)
    return model


@pytest.fixture(scope="module")
def models_of_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GPT]:
    """The exported model of each run."""
    return functools.cache(lambda name: exported(RUNS[name], tmp_path_factory.mktemp("exported")))


NAMES = ("one stage", "shared layers", "float64", "two stages")
TEMPERATURES, PROMPTS = (1.0, 0.0), (0, 5, 12, 13, 1, 40)
SHORT = [(name, 1.0, prompt) for name in NAMES[:3] for prompt in PROMPTS[:4]]
SHORT += [(NAMES[0], 0.0, prompt) for prompt in PROMPTS[:4]]


@pytest.mark.parametrize(
    ("name", "temperature", "prompt"), few(itertools.product(NAMES, TEMPERATURES, PROMPTS), *SHORT)
)
def test_the_cache_changes_no_token_whatever_the_lengths(
    name: str, temperature: float, prompt: int, models_of_runs: Callable[[str], GPT], seed: int
) -> None:
    """Prompts empty, shorter than the context (12), of its length and longer; the text outgrows it several times."""
    model = models_of_runs(name)
    tokens = torch.randint(0, 256, (prompt,)).tolist()
    settings = {"temperature": temperature, "top_k": 50, "seed": seed}
    with_cache = list(generate(model, tokens, 40, **settings))
    assert with_cache == list(generate(WithoutCache(model), tokens, 40, **settings))
    assert len(with_cache) == 40
    assert 0 not in with_cache  # the separator


def test_the_cache_holds_what_it_must_and_the_model_never_sees_more_than_its_context(tmp_path: Path) -> None:
    model = exported(RUNS["two stages"], tmp_path)
    whole, fed = WithoutCache(model), []
    for _ in generate(whole, [1, 2, 3], 30):
        fed.append(whole.seen)
    assert fed == [*range(3, 13), *range(6, 13), *range(6, 13), *range(6, 12)]
    lengths: list[int] = []
    forward = model.forward

    def watched(tokens: torch.Tensor, cache: list[tuple[torch.Tensor, torch.Tensor]] | None = None) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        return forward(tokens, cache)

    model.forward = watched  # type: ignore[method-assign]
    list(generate(model, [1, 2, 3], 30))
    assert lengths == [3, *[1] * 9, 6, *[1] * 6, 6, *[1] * 6, 6, *[1] * 5]
