"""LAMB and LARS against the formulae of their papers, worked out again in plain Python, number by number.

LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020), algorithm 2.
LARS: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017), algorithm 1 and equation 6.
Each tensor is one layer of the paper, whatever its shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.compute.optim import Layout, Optimizer, learning_rate
from peerd.core.runfile import OptimizerSection

LAYOUT = Layout(("matrix", "vector", "number"), (torch.Size([3, 4]), torch.Size([5]), torch.Size([])))
SIZES = (12, 5, 1)

Layers = list[list[float]]


def random(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers(flat: torch.Tensor) -> Layers:
    values = flat.tolist()
    return [values[sum(SIZES[:n]) : sum(SIZES[: n + 1])] for n in range(len(SIZES))]


def length(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values))


class PaperLamb:
    """Algorithm 2, line by line, with phi(z) = z."""

    def __init__(self, section: OptimizerSection) -> None:
        self.s = section
        self.m = [[0.0] * size for size in SIZES]
        self.v = [[0.0] * size for size in SIZES]

    def step(self, x: Layers, g: Layers, t: int, lr: float) -> None:
        s = self.s
        for i, size in enumerate(SIZES):
            r = [0.0] * size
            for j in range(size):
                self.m[i][j] = s.beta1 * self.m[i][j] + (1 - s.beta1) * g[i][j]
                self.v[i][j] = s.beta2 * self.v[i][j] + (1 - s.beta2) * g[i][j] ** 2
                m_hat = self.m[i][j] / (1 - s.beta1**t)
                v_hat = self.v[i][j] / (1 - s.beta2**t)
                r[j] = m_hat / (math.sqrt(v_hat) + s.eps)
            u = [r[j] + s.weight_decay * x[i][j] for j in range(size)]
            ratio = length(x[i]) / length(u) if length(x[i]) and length(u) else 1.0
            x[i] = [x[i][j] - lr * ratio * u[j] for j in range(size)]


class PaperLars:
    """Algorithm 1; lambda is equation 6, with eta and weight decay beta."""

    def __init__(self, section: OptimizerSection) -> None:
        self.s = section
        self.v = [[0.0] * size for size in SIZES]

    def step(self, x: Layers, g: Layers, t: int, lr: float) -> None:
        s = self.s
        for i, size in enumerate(SIZES):
            below = length(g[i]) + s.weight_decay * length(x[i])
            rate = s.trust * length(x[i]) / below if length(x[i]) and below else 1.0
            for j in range(size):
                self.v[i][j] = s.momentum * self.v[i][j] + lr * rate * (g[i][j] + s.weight_decay * x[i][j])
                x[i][j] -= self.v[i][j]


@settings(max_examples=40)
@given(
    name=st.sampled_from(["lamb", "lars"]),
    seed=st.integers(0, 1000),
    weight_decay=st.sampled_from([0.0, 0.01, 0.3]),
    beta=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    momentum=st.sampled_from([0.0, 0.9]),
    trust=st.sampled_from([1e-3, 0.5]),
    idle=st.sets(st.integers(0, 2)),
    decay=st.sampled_from(["none", "cosine"]),
)
def test_lamb_and_lars_are_the_papers(
    name: str, seed: int, weight_decay: float, beta: float, momentum: float, trust: float, idle: set[int], decay: str
) -> None:
    """`idle`: tensors that start at zero; their first gradient is zero as well, so that both norms are."""
    section = OptimizerSection(
        name=name,  # type: ignore[arg-type]
        lr=0.1,
        warmup_steps=2,
        total_steps=10,
        decay=decay,  # type: ignore[arg-type]
        weight_decay=weight_decay,
        beta1=beta,
        beta2=0.97,
        eps=1e-6,
        momentum=momentum,
        trust=trust,
    )
    mine = random(seed)
    for layer in idle:
        LAYOUT.views(mine)[layer].zero_()
    ours, theirs = Optimizer(section, LAYOUT, mine), layers(mine)
    paper = PaperLamb(section) if name == "lamb" else PaperLars(section)
    for step in range(8):
        gradient = random(seed + step + 1)
        if step == 0:
            for layer in idle:
                LAYOUT.views(gradient)[layer].zero_()
        paper.step(theirs, layers(gradient), step + 1, learning_rate(section, step))
        ours.update(mine, gradient, step)
        expected = torch.tensor([value for layer in theirs for value in layer], dtype=torch.float64)
        torch.testing.assert_close(mine, expected, rtol=1e-11, atol=1e-12)


def test_lamb_moves_each_tensor_by_its_own_norm() -> None:
    section = OptimizerSection(name="lamb", lr=0.1, weight_decay=0.3)
    before = random(0)
    after = before.clone()
    Optimizer(section, LAYOUT, after).update(after, random(1), 0)
    for old, new in zip(LAYOUT.views(before), LAYOUT.views(after), strict=True):
        torch.testing.assert_close((new - old).norm(), 0.1 * old.norm())


def test_larss_first_step_is_a_share_of_each_tensors_norm_however_large_the_gradient() -> None:
    section = OptimizerSection(name="lars", lr=0.5, momentum=0.9, trust=0.02)
    for scale in (1e-6, 1.0, 1e6):
        before = random(0)
        after = before.clone()
        Optimizer(section, LAYOUT, after).update(after, random(1) * scale, 0)
        for old, new in zip(LAYOUT.views(before), LAYOUT.views(after), strict=True):
            torch.testing.assert_close((new - old).norm(), 0.5 * 0.02 * old.norm())


def test_a_tensor_of_zeros_takes_a_plain_step() -> None:
    """No norm to scale by: with LAMB Adam's first step, the gradient's sign, remains; with LARS that of SGD."""
    for name, expected in (("lamb", -0.1 * random(1).sign()), ("lars", -0.1 * random(1))):
        parameters = torch.zeros(LAYOUT.count, dtype=torch.float64)
        section = OptimizerSection(name=name, lr=0.1, momentum=0.9)  # type: ignore[arg-type]
        Optimizer(section, LAYOUT, parameters).update(parameters, random(1), 0)
        torch.testing.assert_close(parameters, expected)


def test_lars_momentum_keeps_the_rate_at_which_a_gradient_came_in() -> None:
    """The paper multiplies by the rate before the momentum: without further gradients the rate plays no part."""
    section = OptimizerSection(name="lars", lr=1.0, total_steps=2, decay="linear", final_lr_share=0.0, momentum=0.5)
    parameters = random(0)
    optimizer = Optimizer(section, LAYOUT, parameters)
    start = parameters.clone()
    optimizer.update(parameters, random(1), 0)
    first = parameters - start
    for step, share in ((1, 0.5), (2, 0.25)):
        before = parameters.clone()
        optimizer.update(parameters, torch.zeros_like(parameters), step)
        torch.testing.assert_close(parameters - before, share * first)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_clipping_comes_before_the_norms(name: str) -> None:
    section = OptimizerSection(name=name, lr=0.1, weight_decay=0.1, momentum=0.9)  # type: ignore[arg-type]
    clipped, by_hand = random(0), random(0)
    gradient = random(1)
    Optimizer(msgspec.structs.replace(section, clip_norm=0.5), LAYOUT, clipped).update(clipped, gradient.clone(), 0)
    Optimizer(section, LAYOUT, by_hand).update(by_hand, gradient * (0.5 / gradient.norm()), 0)
    torch.testing.assert_close(clipped, by_hand, rtol=1e-12, atol=1e-12)
