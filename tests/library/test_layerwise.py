"""`peerd.Lamb` and `peerd.Lars`: the values of runs with the same optimizer, and torch's ways."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import peerd
from peerd.codec.flat import FlatLayout
from peerd.model.optimizer import Optimizer, learning_rate
from peerd.run.runfile import OptimizerSection

SHAPES = (torch.Size([3, 4]), torch.Size([5]), torch.Size([]))
LAYOUT = FlatLayout(("a", "b", "c"), SHAPES)
BOTH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"lamb": peerd.Lamb, "lars": peerd.Lars}


def random(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(values: torch.Tensor) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(view.clone()) for view in LAYOUT.views(values)]


def made(section: OptimizerSection, params: Any) -> torch.optim.Optimizer:
    if section.name == "lars":
        return peerd.Lars(params, section.lr, section.momentum, section.weight_decay, section.trust)
    return peerd.Lamb(params, section.lr, (section.beta1, section.beta2), section.eps, section.weight_decay)


@pytest.mark.parametrize(
    "section",
    [
        OptimizerSection(name="lamb", lr=0.02),
        OptimizerSection(name="lamb", lr=0.02, weight_decay=0.1, beta1=0.8, beta2=0.99, eps=1e-6),
        OptimizerSection(name="lars", lr=0.5, trust=0.01),
        OptimizerSection(name="lars", lr=0.5, trust=0.01, momentum=0.9, weight_decay=0.1),
        OptimizerSection(name="lamb", lr=0.1, warmup_steps=5, total_steps=20, decay="cosine"),
        OptimizerSection(name="lars", lr=0.5, momentum=0.9, warmup_steps=5, total_steps=20, decay="linear"),
    ],
)
def test_they_give_the_values_of_a_run_file(section: OptimizerSection) -> None:
    flat = random(0)
    own = parameters(flat)
    run, optimizer = Optimizer(section, LAYOUT, flat), made(section, own)
    for step in range(20):
        gradient = random(step + 1)
        for parameter, part in zip(own, LAYOUT.views(gradient), strict=True):
            parameter.grad = part.clone()
        optimizer.param_groups[0]["lr"] = learning_rate(section, step)
        optimizer.step()
        run.update(flat, gradient, step)
        for parameter, value in zip(own, LAYOUT.views(flat), strict=True):
            torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BOTH)
def test_a_parameter_without_a_gradient_is_left_alone(name: str) -> None:
    own = parameters(random(0))
    optimizer = BOTH[name](own)
    own[0].grad = torch.ones(3, 4, dtype=torch.float64)
    optimizer.step()
    assert not torch.equal(own[0], LAYOUT.views(random(0))[0])
    assert torch.equal(own[1], LAYOUT.views(random(0))[1])
    assert set(optimizer.state) == {own[0]}


@pytest.mark.parametrize("name", BOTH)
def test_a_step_takes_a_closure_and_the_state_comes_back(name: str) -> None:
    first, second = parameters(random(0)), parameters(random(0))
    one, other = BOTH[name](first), BOTH[name](second)

    def loss(of: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        total = sum((p.square().sum() for p in of), torch.zeros(()))
        total.backward()  # type: ignore[no-untyped-call]
        return total.detach()

    told = one.step(lambda: loss(first, one))  # type: ignore[arg-type, return-value]
    assert told is not None
    assert float(told) == pytest.approx(float(random(0).square().sum()))
    second[:] = parameters(torch.cat([p.detach().reshape(-1) for p in first]))
    other = BOTH[name](second)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for optimizer, of in ((one, first), (other, second)):
        optimizer.step(lambda of=of, optimizer=optimizer: loss(of, optimizer))  # type: ignore[misc]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("lamb", {"lr": -1.0}, "lr is -1.0"),
        ("lamb", {"betas": (0.9, 1.0)}, "betas is"),
        ("lamb", {"eps": 0.0}, "eps is 0.0"),
        ("lars", {"momentum": 1.0}, "momentum is 1.0"),
        ("lars", {"trust": 0.0}, "trust is 0.0"),
        ("lars", {"weight_decay": -0.1}, "weight_decay is -0.1"),
    ],
)
def test_settings_out_of_range_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BOTH[name](parameters(random(0)), **settings)


@pytest.mark.parametrize("name", BOTH)
def test_sparse_gradients_are_refused(name: str) -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="does not support sparse gradients"):
        BOTH[name](table.parameters()).step()
