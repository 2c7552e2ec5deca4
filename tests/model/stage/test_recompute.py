"""Layers that are computed again in the backward give the bits of layers that are kept, and take less memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peerd.core.decoders import convert
from peerd.model.stage.partition import ModelPiece
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import RunFile


def run(stages: int, **model: object) -> RunFile:
    sizes = {"d_model": 32, "heads": 2, "layers": 6, "context": 16} | model
    return convert({"run": "again", "model": sizes, "pipeline": {"stages": stages, "microbatch": 2}}, RunFile)


def passed(stage: StageModule, keeps: bool) -> tuple[Tensor | None, Tensor]:
    """Gradients of the input and of the parameters, after three microbatches."""
    numbers = torch.Generator().manual_seed(1)
    given = None
    for _ in range(3):
        tokens = torch.randint(256, (2, 16), generator=numbers)
        x = tokens if stage.first else torch.randn(2, 16, 32, generator=numbers)
        target = tokens if stage.last else torch.randn(2, 16, 32, generator=numbers)
        graph = stage.forward_for_backward(x) if keeps and stage.keeps_graphs else None
        given, _ = stage.backward(x, target, graph=graph)
    return given, stage.gradient()


@pytest.mark.parametrize("model", [{}, {"share_layers": True}, {"dtype": "float64"}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize(("stages", "stage"), [(1, 0), (2, 0), (3, 1), (2, 1)])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_bits_are_those_of_layers_that_are_kept(
    stages: int, stage: int, keeps: bool, model: dict[str, object]
) -> None:
    if model.get("dtype") == "float64" and stages > 1:
        pytest.skip("the activations of the test are float32")
    plain, again = StageModule(run(stages, **model), stage), StageModule(run(stages, **model), stage)
    again.recompute()
    (x, gradient), (x_again, gradient_again) = passed(plain, keeps), passed(again, keeps)
    assert torch.equal(gradient, gradient_again)
    assert x is x_again is None or torch.equal(x, x_again)  # type: ignore[arg-type]
    assert again.activation_bytes - again.layout.count * gradient.itemsize < 0.6 * (
        plain.activation_bytes - plain.layout.count * gradient.itemsize
    )


def test_dropout_draws_the_same_numbers_again() -> None:
    torch.manual_seed(3)
    layers = [(str(i), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), 1) for i in range(4)]
    piece = ModelPiece(layers).train()
    found = []
    for recomputes in (False, True):
        piece.recomputes = recomputes
        torch.manual_seed(7)
        x = torch.ones(4, 8, requires_grad=True)
        found.append(torch.autograd.grad(piece(x).sum(), [x, *piece.parameters()]))
    assert all(map(torch.equal, *found))
