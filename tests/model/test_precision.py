"""Mixed precision in a stage: close to full precision, nothing lost at either end of fp16, nothing that lingers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peerd.model import precision
from peerd.model.precision import Precision
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import ModelSection, OptimizerSection, PipelineSection, RunFile
from tests.kit.amount import examples

TOKENS = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(2))
MIXED = ["bf16", "fp16"]
CPU = torch.device("cpu")


def stage(number: int, name: str, stages: int = 2) -> StageModule:
    run = RunFile(
        run="mixed",
        model=ModelSection(d_model=32, heads=2, layers=2, context=16, precision=name),  # type: ignore[arg-type]
        pipeline=PipelineSection(stages=stages, microbatch=4),
        optimizer=OptimizerSection(lr=0.01),
    )
    return StageModule(run, number)


def both_gradients(name: str) -> tuple[Tensor, Tensor, float]:
    first, last = stage(0, name), stage(1, name)
    hidden = first.forward(TOKENS)
    inner, loss = last.backward(hidden, TARGETS)
    assert inner is not None
    assert hidden.dtype == inner.dtype == torch.float32
    first.backward(TOKENS, inner)
    return first.gradient(), last.gradient(), loss


@pytest.mark.slow  # torch looks for its 16-bit kernels when first asked
@pytest.mark.parametrize(("name", "tolerance"), [("bf16", 0.02), ("fp16", 0.003)])
def test_gradients_are_close_to_those_of_full_precision_and_kept_in_the_runs_dtype(name: str, tolerance: float) -> None:
    full, mixed = both_gradients("full"), both_gradients(name)
    for expected, found in zip(full[:2], mixed[:2], strict=True):
        assert found.dtype == torch.float32
        assert not torch.equal(found, expected)  # 16 bits were used
        assert float((found - expected).norm() / expected.norm()) < tolerance
    assert mixed[2] == pytest.approx(full[2], rel=1e-3)


@pytest.mark.parametrize("name", ["full", *MIXED])
@pytest.mark.parametrize("number", [0, 1])
def test_a_microbatch_that_is_taken_out_again_leaves_nothing(name: str, number: int) -> None:
    computing = stage(number, name)
    x = TOKENS if number == 0 else torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(3))
    target = TARGETS if number else torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(4))
    computing.backward(x, target)
    assert computing.gradient().any()
    computing.backward(x, target, sign=-1.0)
    assert not computing.gradient().any()


@pytest.mark.slow
@settings(max_examples=examples(15))
@given(power=st.integers(-80, 60))
def test_fp16_serves_gradients_of_any_size_alike(power: int) -> None:
    """The factor follows what comes in: the same gradient, larger or smaller, gives the same bits, so much larger."""
    gradient = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(5))
    found = {}
    for size in (0, power):
        computing = stage(0, "fp16")
        computing.backward(TOKENS, gradient * 2.0**size)
        found[size] = computing.gradient()
    assert torch.equal(found[0] * 2.0**power, found[power])


def test_without_a_factor_fp16_would_lose_small_gradients() -> None:
    """The purpose of the loss factor: without it, gradients underflow."""
    weight = torch.ones(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        output = (torch.full((1, 8), 1e-4) @ weight).float()
    seed = torch.full_like(output, 1e-5)
    (lost,) = torch.autograd.grad(output, [weight], seed)
    assert not lost.any()

    def compute() -> Tensor:
        with computing.casting():
            return (torch.full((1, 8), 1e-4) @ weight).float()

    computing = Precision("fp16", CPU)
    _, (kept,) = computing.backward(compute, [weight], seed)
    torch.testing.assert_close(kept, torch.full((8, 8), 1e-9), rtol=2e-3, atol=0)


def test_a_factor_that_overflows_is_made_smaller_until_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stage(0, "fp16")
    gradient = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(5))
    expected.backward(TOKENS, gradient)
    monkeypatch.setattr(precision, "LARGEST", 2.0**24)
    computing = stage(0, "fp16")
    computing.backward(TOKENS, gradient)
    found = computing.gradient()
    assert float((found - expected.gradient()).norm() / found.norm()) < 0.003


@pytest.mark.parametrize("name", MIXED)
def test_a_stage_whose_output_overflows_is_refused_and_unchanged(name: str) -> None:
    computing = stage(1, name)
    state = computing.state()
    for tensor_name, tensor in state.items():
        if tensor_name == "param/head.norm.gain":
            tensor.fill_(3e38)
    computing.load_state(state)
    with pytest.raises(ValueError, match="not finite"):
        computing.backward(torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(3)), TARGETS)
    assert not computing.gradient().any()


def test_a_gradient_of_zeros_is_zeros() -> None:
    computing = stage(0, "fp16")
    computing.backward(TOKENS, torch.zeros(4, 16, 32))
    assert not computing.gradient().any()


def test_what_no_factor_helps_is_tried_a_bounded_number_of_times() -> None:
    weight = torch.ones(4, requires_grad=True)
    asked = []

    def compute() -> Tensor:
        asked.append(1)
        return (weight - 1).sqrt().sum()  # the slope there is infinite

    _, (found,) = Precision("fp16", CPU).backward(compute, [weight], None)
    assert not found.isfinite().any()
    assert len(asked) == precision.ATTEMPTS


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_a_model_learns_in_sixteen_bits(name: str) -> None:
    losses = {}
    for used in ("full", name):
        computing = stage(0, used, stages=1)
        for _ in range(30):
            _, loss = computing.backward(TOKENS, TARGETS)
            computing.apply(computing.gradient() / len(TOKENS))
        losses[used] = loss / len(TOKENS)
    assert losses["full"] < 1.0
    assert losses[name] == pytest.approx(losses["full"], rel=0.1, abs=0.02)
