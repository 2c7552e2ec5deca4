"""Error feedback: coarse codes lose nothing over many rounds, and a round that failed never was."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peerd.compute.coding import NotFinite, Plan, decode, encode
from peerd.compute.feedback import ErrorFeedback
from peerd.core.errors import LocalError


def gradients(seed: int, rounds: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(100, generator=generator).to(dtype) for _ in range(rounds)]


@settings(max_examples=25)
@given(
    code=st.sampled_from(["int4", "nf4", "int8", "dynamic8", "fp8-e4m3", "bf16", "fp16", "none"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rounds=st.lists(st.booleans(), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_the_sum_of_what_arrives_differs_from_the_true_sum_by_the_last_residual(
    code: str, dtype: torch.dtype, rounds: list[bool], seed: int
) -> None:
    feedback = ErrorFeedback()
    true, arrived = torch.zeros(100, dtype=torch.float64), torch.zeros(100, dtype=torch.float64)
    for gradient, success in zip(gradients(seed, len(rounds), dtype), rounds, strict=True):
        decoded = decode(feedback.encode("w", gradient, Plan(code)), (100,), dtype)
        if success:
            feedback.settle()
            true += gradient.double()
            arrived += decoded.double()
        else:
            feedback.undo()
    residual = feedback.state().get("w", torch.zeros(100)).double()
    # Each round adds in single precision: a rounding of about 2^-24 of values below 16.
    assert (true - arrived - residual).abs().max() <= len(rounds) * 2**-20
    # The residual is one round's error: at most half the largest step of any of these codes, of a largest value.
    assert residual.abs().max() <= 0.2 * (true.abs().max() + 8)


def test_an_exact_code_leaves_no_residual() -> None:
    feedback = ErrorFeedback()
    feedback.encode("w", torch.ones(3), Plan())
    feedback.settle()
    assert feedback.state()["w"].tolist() == [0, 0, 0]


def descend(feedback: ErrorFeedback | None) -> float:
    """SGD on a quadratic whose first coordinate is noisy; returns how far the others end from their minimum."""
    generator = torch.Generator().manual_seed(1)
    target = torch.linspace(0.5, 1.5, 64)
    x = torch.zeros(64)
    for step in range(300):
        gradient = x - target
        gradient[0] = 40.0 * (-1) ** step  # every block has so large a value: int4's steps are a seventh of it
        gradient += 0.01 * torch.randn(64, generator=generator)
        plan = Plan("int4")
        if feedback is None:
            frame = encode(gradient, plan)
        else:
            frame = feedback.encode("x", gradient, plan)
            feedback.settle()
        x -= 0.02 * decode(frame)
    return float((x - target)[1:].abs().max())


def test_descent_in_four_bits_converges_with_feedback_and_stalls_without() -> None:
    assert descend(None) > 1.4
    assert descend(ErrorFeedback()) < 0.2


def test_a_round_that_failed_leaves_the_same_bits_to_be_sent_again() -> None:
    first, second, third = gradients(3, 3)
    straight, stumbling = ErrorFeedback(), ErrorFeedback()
    for gradient in (first, second, third):
        expected = straight.encode("w", gradient, Plan("int4"))
        straight.settle()
        for _ in range(2):
            stumbling.encode("w", gradient, Plan("int4"))
            stumbling.undo()
        stumbling.encode("w", third, Plan("int8"))  # coded again in one round: only the last one counts
        assert bytes(stumbling.encode("w", gradient, Plan("int4")).payload) == bytes(expected.payload)
        stumbling.settle()
    assert torch.equal(straight.state()["w"], stumbling.state()["w"])


def test_names_are_apart_and_a_round_without_a_name_keeps_its_residual() -> None:
    feedback = ErrorFeedback()
    a, b = gradients(4, 2)
    for name, gradient in (("a", a), ("b", b)):
        feedback.encode(name, gradient, Plan("int4"))
    feedback.settle()
    before = feedback.state()
    feedback.encode("b", b, Plan("int4"))
    feedback.settle()
    assert torch.equal(feedback.state()["a"], before["a"])
    assert not torch.equal(feedback.state()["b"], before["b"])


def test_residuals_survive_a_checkpoint() -> None:
    one, other = ErrorFeedback(), ErrorFeedback()
    first, second = gradients(5, 2, torch.bfloat16)
    one.encode("w", first, Plan("nf4"))
    one.settle()
    other.encode("w", second, Plan("nf4"))
    other.load(one.state())
    payloads = [bytes(each.encode("w", second, Plan("nf4")).payload) for each in (one, other)]
    assert payloads[0] == payloads[1]


def test_what_cannot_be_coded_changes_nothing() -> None:
    feedback = ErrorFeedback()
    (gradient,) = gradients(6, 1)
    feedback.encode("w", gradient, Plan("int4"))
    feedback.settle()
    before = feedback.state()["w"].clone()
    with pytest.raises(NotFinite, match="w has NaN"):
        feedback.encode("w", gradient * math.nan, Plan("int4"))
    with pytest.raises(LocalError, match=r"w has shape \[7\]; its residual has \[100\]"):
        feedback.encode("w", torch.ones(7), Plan("int4"))
    with pytest.raises(LocalError, match=r"a gradient of torch\.int64 has no residual"):
        feedback.encode("n", torch.ones(7, dtype=torch.int64), Plan("int4"))
    feedback.settle()
    assert torch.equal(feedback.state()["w"], before)
    assert list(feedback.state()) == ["w"]
