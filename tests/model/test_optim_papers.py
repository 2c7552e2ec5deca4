"""LAMB and LARS against the formulae of their papers (tests/kit/papers.py), and what follows from these."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.codec.flat import FlatLayout
from peerd.model.optimizer import Optimizer, learning_rate
from peerd.run.runfile import OptimizerSection
from tests.kit.amount import examples
from tests.kit.papers import Layers, PaperLamb, PaperLars

LAYOUT = FlatLayout(("matrix", "vector", "number"), (torch.Size([3, 4]), torch.Size([5]), torch.Size([])))


def random(seed: int) -> torch.Tensor:
    return torch.randn(LAYOUT.count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers(flat: torch.Tensor) -> Layers:
    """Each tensor's own memory."""
    return [view.numpy() for view in LAYOUT.views(flat)]


@settings(max_examples=examples(40))
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
    theirs = mine.clone()
    ours = Optimizer(section, LAYOUT, mine)
    paper = (PaperLamb if name == "lamb" else PaperLars)(section, layers(theirs))
    for step in range(8):
        gradient = random(seed + step + 1)
        if step == 0:
            for layer in idle:
                LAYOUT.views(gradient)[layer].zero_()
        paper.step(layers(theirs), layers(gradient), learning_rate(section, step))
        ours.update(mine, gradient, step)
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


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
