"""The dry run of a model of one's own: each kind of wrong layer is one sentence with what it got and what it gave."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from peerd.core.errors import ConfigError
from peerd.model.stage.dry_run import try_layers
from peerd.run.config import load_run
from peerd.run.runfile import ModelSection, PipelineSection, RunFile

OWN = """
import torch
from torch import nn

class Of(nn.Module):
    def __init__(self, width, what):
        super().__init__()
        self.line, self.what = nn.Linear(width, width), what

    def forward(self, x):
        return self.what(self, x)

def with_layer(what):
    return lambda run: [nn.Embedding(256, 8), Of(8, what), nn.Linear(8, 256)]

good = with_layer(lambda self, x: self.line(x))
wide = lambda run: [nn.Embedding(256, 8), nn.Linear(8, 16), nn.Linear(16, 256)]
few_tokens = lambda run: [nn.Embedding(100, 8), nn.Linear(8, 256)]
few_scores = lambda run: [nn.Embedding(256, 8), nn.Linear(8, 100)]
double = with_layer(lambda self, x: self.line(x).double())
pair = with_layer(lambda self, x: (self.line(x), x))
cut_off = with_layer(lambda self, x: self.line(x.detach()))
without = with_layer(lambda self, x: self.line(x).detach())
noisy = with_layer(lambda self, x: self.line(x) + torch.rand_like(x))
in_place = with_layer(lambda self, x: self.line(x) + x.data.mul_(2))
infinite = with_layer(lambda self, x: self.line(x) / 0)
broken = with_layer(lambda self, x: x @ x)
transposed = with_layer(lambda self, x: self.line(x).transpose(0, 1))

def buffers(run):
    return [nn.Embedding(256, 8), nn.BatchNorm1d(5), nn.Linear(8, 256)]

def frozen(run):
    table = nn.Embedding(256, 8)
    table.weight.requires_grad = False
    return [table, nn.Linear(8, 256)]

def tied(run):
    table, out = nn.Embedding(256, 8), nn.Linear(8, 256, bias=False)
    out.weight = table.weight
    return [table, nn.Linear(8, 8), nn.Linear(8, 8), out]

def raises(run):
    return run.model.colour

def one_hot(run):
    class Code(nn.Module):
        def forward(self, x):
            return nn.functional.one_hot(x, 256)[..., :8].float()
    return [Code(), nn.Linear(8, 256)]
"""


def own(name: str, **model: object) -> RunFile:
    section = msgspec.structs.replace(ModelSection(kind=f"mine:{name}", d_model=8, context=5), **model)
    return RunFile(run="own", model=section, pipeline=PipelineSection(stages=2))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ["good", "one_hot", "buffers"])
def test_layers_that_keep_the_contract_pass_whatever_gpt_demands(name: str) -> None:
    try_layers(own(name, heads=5, layers=1))
    try_layers(RunFile(run="gpt"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "wide",
            "model.kind mine:wide: layer 1 (Linear) got [2, 5, 8] float32 and returned [2, 5, 16] float32; "
            "expected [2, 5, 8] float32 (samples, model.context, model.d_model)",
        ),
        ("few_tokens", "layer 0 (Embedding) got [2, 5] int64 and failed: IndexError: index out of range"),
        (
            "few_scores",
            "layer 1 (Linear) got [2, 5, 8] float32 and returned [2, 5, 100] float32; expected [2, 5, 256] float32 "
            "(samples, model.context, tokens of the vocabulary)",
        ),
        ("double", "layer 1 (Of) got [2, 5, 8] float32 and returned [2, 5, 8] float64; expected [2, 5, 8] float32"),
        ("pair", "layer 1 (Of) got [2, 5, 8] float32 and returned tuple; expected a tensor"),
        ("cut_off", "layer 1 (Of) got [2, 5, 8] float32, and no gradient flows back to its input"),
        ("without", "layer 1 (Of) got [2, 5, 8] float32, and no gradient flows back through it"),
        ("noisy", "layer 1 (Of) got [2, 5, 8] float32 twice and returned different values"),
        ("in_place", "layer 1 (Of) got [2, 5, 8] float32 and changed it"),
        ("infinite", "layer 1 (Of) got [2, 5, 8] float32 and returned values that are not finite"),
        ("broken", "layer 1 (Of) got [2, 5, 8] float32 and failed: RuntimeError: "),
        ("transposed", "layer 1 (Of) got [2, 5, 8] float32 and returned [5, 2, 8] float32; expected [2, 5, 8]"),
        ("frozen", "layer 0 (Embedding): weight cannot be trained (requires_grad is False)"),
        ("tied", "layer 3 (Linear) shares weight with model.kind mine:tied: layer 0 (Embedding) of another stage"),
        ("raises", "model.kind mine:raises failed: AttributeError: 'ModelSection' object has no attribute 'colour' ("),
    ],
)
def test_a_wrong_layer_is_one_sentence(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        try_layers(own(name))
    assert "\n" not in str(caught.value)


def test_the_example_in_configs_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).resolve().parents[3]
    monkeypatch.chdir(root)
    loaded = load_run(Path("configs/own_model.yaml"))
    assert not loaded.unknown
    assert not loaded.notes
    try_layers(loaded.run)
