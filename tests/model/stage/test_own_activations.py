"""Activations of a user's own layers: a few samples tell what torch saves of a whole microbatch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peerd.core.decoders import convert
from peerd.core.errors import ConfigError
from peerd.model.stage.footprint import footprint, measured_footprint
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import RunFile

CONTEXT, WIDTH, VOCAB = 32, 64, 256
LAYERS = """
import torch
from torch import nn

class Mix(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.over_time = nn.Conv1d(width, width, kernel_size=8, groups=width)
        self.gate = nn.Linear(width, 2 * width)

    def forward(self, x):
        before = nn.functional.pad(self.norm(x).transpose(1, 2), (7, 0))
        value, gate = self.gate(self.over_time(before).transpose(1, 2)).chunk(2, dim=-1)
        return x + value * torch.sigmoid(gate)

class Fails(nn.Module):
    def forward(self, x):
        raise RuntimeError("no rain today")

def layers(run):
    width = run.model.d_model
    return [nn.Embedding(256, width), *(Mix(width) for _ in range(4)), nn.Linear(width, 256)]

def failing(run):
    return [nn.Embedding(256, 64), Fails(), nn.Linear(64, 256)]
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "probed.py").write_text(LAYERS)
    monkeypatch.chdir(tmp_path)


def run(stages: int, name: str = "layers", microbatch: int = 8, **model: object) -> RunFile:
    sizes = {"kind": f"probed.py:{name}", "d_model": WIDTH, "context": CONTEXT} | model
    return convert({"run": "x", "model": sizes, "pipeline": {"stages": stages, "microbatch": microbatch}}, RunFile)


def saved_bytes(run: RunFile, stage: int, again: bool) -> int:
    """What torch saves of a microbatch's forward, the loss's own backward not counted."""
    module = StageModule(run, stage)
    if again:
        assert module.recompute()
    samples = run.pipeline.microbatch
    tokens = torch.zeros(samples, CONTEXT, dtype=torch.int64)
    values = torch.ones(samples, CONTEXT, WIDTH)
    module.backward(tokens if module.first else values, tokens if module.last else values)
    loss = 2 * samples * CONTEXT * VOCAB * 4 if module.last else 0
    return module.activation_bytes - module.layout.count * 4 + loss


@pytest.mark.parametrize("precision", ["full", "bf16"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_what_is_measured_is_what_torch_saves_of_a_microbatch(stages: int, precision: str) -> None:
    found = run(stages, precision=precision)
    for stage in range(stages):
        activations = measured_footprint(found, stage).activations
        assert saved_bytes(found, stage, False) == pytest.approx(activations.kept, rel=0.05)
        assert 0 < activations.recomputed < activations.kept


def test_layers_that_are_computed_again_leave_their_inputs_and_the_largest_of_them() -> None:
    found = run(2)  # an embedding and two of the equal layers; the largest is the last
    assert saved_bytes(found, 0, True) == pytest.approx(measured_footprint(found, 0).activations.recomputed, rel=0.1)


def test_activations_grow_with_samples_and_copies_of_weights_do_not() -> None:
    four, eight = (measured_footprint(run(2, microbatch=n, precision="bf16"), 0).activations.kept for n in (4, 8))
    copies = 2 * sum(p.numel() for p in StageModule(run(2), 0)._piece.parameters() if p.ndim == 2)
    copies -= 2 * 256 * WIDTH  # the embedding is no product
    assert 2 * four - eight == pytest.approx(copies, rel=0.2)


def test_the_rest_is_as_without_measuring_and_random_numbers_are_left_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    measured, known = measured_footprint(run(2), 1), footprint(run(2), 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert measured.device_bytes == known.device_bytes
    assert (measured.parameters, known.activations.kept) == (known.parameters, 0)


def test_a_layer_that_fails_is_named() -> None:
    with pytest.raises(ConfigError, match=r"layer 1 \(Fails\) failed.*no rain today"):
        measured_footprint(run(1, "failing"), 0)
