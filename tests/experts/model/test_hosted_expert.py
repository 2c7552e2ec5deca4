"""An expert at work: merged batches, updates at once, refusals before any change, snapshots."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch

from peerd.codec.frames import from_frame, to_frame
from peerd.experts.model.blocks import build_block
from peerd.experts.model.hosted_expert import BadRequest, HostedExpert, optimizer_section
from peerd.run.grid import Uid
from peerd.run.runfile import ExpertOptimizerSection
from tests.kit.expert_runs import WIDTH, expert_run, frame, values

UID = Uid(0, (1, 2))


def pair(rows: int, seed: int = 0) -> tuple[Any, Any]:
    return frame(rows, WIDTH, seed=seed), frame(rows, WIDTH, seed=seed + 100)


def test_a_forward_of_several_callers_gives_each_its_own_rows() -> None:
    expert, block = HostedExpert(expert_run(), UID), build_block(expert_run(), UID)
    answers = expert.forward([frame(3, WIDTH, seed=1), frame(5, WIDTH, seed=2)])
    for answer, x in zip(answers, (values(3, WIDTH, seed=1), values(5, WIDTH, seed=2)), strict=True):
        assert torch.allclose(from_frame(answer), block(x), atol=1e-6)
    assert expert.version == 0


@pytest.mark.slow  # torch.optim imports half of torch when it is first used
@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.9}, {"name": "adamw", "lr": 0.01}, {"clip_norm": 0.05}])
def test_ten_updates_are_those_of_torchs_own_optimizer(optimizer: dict[str, Any]) -> None:
    run = expert_run(optimizer=optimizer)
    expert, block = HostedExpert(run, UID), build_block(run, UID)
    assert run.experts is not None
    o = run.experts.optimizer
    reference: torch.optim.Optimizer = torch.optim.SGD(block.parameters(), lr=o.lr, momentum=o.momentum)
    if o.name == "adamw":
        reference = torch.optim.AdamW(block.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), weight_decay=0)
    for step in range(10):
        answers = expert.backward([pair(2, seed=step), pair(4, seed=step + 50)])
        x = torch.cat([values(2, WIDTH, seed=step), values(4, WIDTH, seed=step + 50)]).requires_grad_()
        slope = torch.cat([values(2, WIDTH, seed=step + 100), values(4, WIDTH, seed=step + 150)])
        reference.zero_grad()
        block(x).backward(slope)
        torch.nn.utils.clip_grad_norm_(block.parameters(), o.clip_norm)
        reference.step()
        assert torch.allclose(torch.cat([from_frame(a) for a in answers]), x.grad, atol=1e-5)
    assert expert.version == 10
    probe = values(7, WIDTH, seed=9)
    assert torch.allclose(from_frame(expert.forward([to_frame(probe)])[0]), block(probe), atol=1e-4)


def test_the_learning_rate_follows_the_experts_own_updates() -> None:
    run = expert_run(optimizer={"lr": 1.0, "warmup_updates": 4, "clip_norm": 0.0})
    moved = []
    expert = HostedExpert(run, UID)
    for _ in range(2):
        before = safetensors.torch.load(expert.snapshot())["param/down.bias"]
        expert.backward([pair(2)])
        moved.append(float((safetensors.torch.load(expert.snapshot())["param/down.bias"] - before).norm()))
    assert moved[1] == pytest.approx(2 * moved[0], rel=1e-3)  # the bias's gradient is that of the outputs alone


def test_a_backward_uses_the_weights_of_now() -> None:
    expert = HostedExpert(expert_run(optimizer={"lr": 0.5}), UID)
    first = from_frame(expert.backward([pair(3)])[0])
    assert not torch.allclose(from_frame(expert.backward([pair(3)])[0]), first)


def bad(kind: str) -> Any:
    x = values(2, WIDTH)
    if kind == "nan":
        x[1, 3] = math.nan
    elif kind == "infinite":
        x[0, 0] = math.inf
    elif kind == "shape":
        x = values(2, WIDTH + 1)
    elif kind == "dtype":
        x = x.double()
    elif kind == "empty":
        x = values(0, WIDTH)
    return to_frame(x)


@pytest.mark.parametrize("kind", ["nan", "infinite", "shape", "dtype", "empty"])
@pytest.mark.parametrize("place", ["forward", "samples", "gradients"])
def test_a_bad_request_is_named_by_its_index_and_changes_nothing(kind: str, place: str) -> None:
    expert = HostedExpert(expert_run(optimizer={"name": "adamw"}), UID)
    before = expert.snapshot()
    one = (bad(kind), frame(2, WIDTH)) if place == "samples" else (frame(2, WIDTH), bad(kind))
    with pytest.raises(BadRequest, match=r"0\.1\.2") as caught:
        expert.forward([frame(2, WIDTH), bad(kind)]) if place == "forward" else expert.backward([pair(2), one])
    assert caught.value.index == 1
    assert expert.snapshot() == before


def test_gradients_of_another_number_of_samples_are_refused() -> None:
    expert = HostedExpert(expert_run(), UID)
    with pytest.raises(BadRequest, match="3 samples with gradients of 2"):
        expert.backward([(frame(3, WIDTH), frame(2, WIDTH))])


def test_a_gradient_that_would_overflow_the_moments_is_laid_to_its_sender() -> None:
    expert = HostedExpert(expert_run(optimizer={"name": "adamw", "clip_norm": 0.0}), UID)
    before = expert.snapshot()
    huge = (frame(2, WIDTH), to_frame(values(2, WIDTH) * 1e25))
    with pytest.raises(BadRequest, match="overflows") as caught:
        expert.backward([pair(2), pair(3), huge])
    assert caught.value.index == 2
    assert expert.snapshot() == before


def test_an_output_that_overflows_is_laid_to_its_sender() -> None:
    expert = HostedExpert(expert_run(block="ffn1"), UID)
    with pytest.raises(BadRequest, match="not finite") as caught:
        expert.forward([to_frame(torch.full((1, WIDTH), 3e38)), frame(1, WIDTH)])
    assert caught.value.index == 0


@pytest.mark.parametrize("code", ["bf16", "fp16", "dynamic8", "int8"])
def test_answers_travel_in_the_code_of_the_run(code: str) -> None:
    plain, coded = HostedExpert(expert_run(), UID), HostedExpert(expert_run(code=code), UID)
    (exact,), (answer,) = plain.forward([frame(4, WIDTH)]), coded.forward([frame(4, WIDTH)])
    assert answer.coding == code
    assert torch.allclose(from_frame(answer), from_frame(exact), atol=0.1)


def test_samples_in_bfloat16_are_answered_in_bfloat16() -> None:
    expert, exact = HostedExpert(expert_run(dtype="bfloat16"), UID), HostedExpert(expert_run(), UID)
    x = values(4, WIDTH, dtype=torch.bfloat16)
    answer = from_frame(expert.forward([to_frame(x)])[0])
    assert answer.dtype == torch.bfloat16
    assert torch.allclose(answer.float(), from_frame(exact.forward([to_frame(x.float())])[0]), atol=0.05)
    (slope,) = expert.backward([(to_frame(x), to_frame(x))])
    assert from_frame(slope).dtype == torch.bfloat16
    assert expert.version == 1


def test_a_snapshot_goes_on_bit_for_bit() -> None:
    run = expert_run(optimizer={"name": "adamw", "lr": 0.01})
    one, other = HostedExpert(run, UID), HostedExpert(run, UID)
    for step in range(3):
        one.backward([pair(2, seed=step)])
    other.load(one.snapshot())
    assert other.version == 3
    assert other.snapshot() == one.snapshot()
    for expert in (one, other):
        expert.backward([pair(2, seed=9)])
    assert other.snapshot() == one.snapshot()


def test_nbytes_counts_weights_and_moments() -> None:
    plain, adam = HostedExpert(expert_run(), UID), HostedExpert(expert_run(optimizer={"name": "adamw"}), UID)
    count = sum(p.numel() for p in build_block(expert_run(), UID).parameters())
    assert (plain.nbytes, adam.nbytes) == (4 * count, 12 * count)


def lying(kind: str, data: bytes) -> bytes:
    state = safetensors.torch.load(data)
    if kind == "noise":
        return b"\x07" * 100
    if kind == "cut":
        return data[:-5]
    if kind == "huge":
        return data + bytes(1 << 21)
    if kind == "nan":
        state["param/up.weight"][0, 0] = math.nan
    elif kind == "moments":
        state["opt/up.weight/exp_avg_sq"][0, 0] = -1.0
    elif kind == "shape":
        state["param/up.weight"] = state["param/up.weight"].T.contiguous()
    elif kind == "dtype":
        state["param/up.weight"] = state["param/up.weight"].double()
    elif kind == "lacks":
        del state["param/up.weight"]
    elif kind == "more":
        state["param/other"] = torch.zeros(1)
    elif kind == "version":
        state["version"] = torch.tensor(-1)
    elif kind == "no version":
        del state["version"]
    return safetensors.torch.save(state)


@pytest.mark.parametrize(
    "kind",
    ["noise", "cut", "huge", "nan", "moments", "shape", "dtype", "lacks", "more", "version", "no version"],
)
def test_a_state_that_does_not_fit_changes_nothing(kind: str) -> None:
    run = expert_run(optimizer={"name": "adamw"})
    expert, other = HostedExpert(run, UID), HostedExpert(run, UID)
    other.backward([pair(2)])
    before = expert.snapshot()
    with pytest.raises(ValueError, match=r"expert 0\.1\.2"):
        expert.load(lying(kind, other.snapshot()))
    assert expert.snapshot() == before


def test_a_run_of_another_optimizer_does_not_take_the_moments() -> None:
    adam = HostedExpert(expert_run(optimizer={"name": "adamw"}), UID)
    with pytest.raises(ValueError, match="has the unknown"):
        HostedExpert(expert_run(), UID).load(adam.snapshot())


def test_the_optimizer_of_an_expert_has_every_setting_of_its_section() -> None:
    odd = ExpertOptimizerSection(
        name="adamw", lr=0.3, warmup_updates=3, total_updates=9, decay="cosine", final_lr_share=0.2, weight_decay=0.4,
        momentum=0.0, beta1=0.5, beta2=0.6, eps=0.7, clip_norm=0.8,
    )  # fmt: skip
    found = msgspec.to_builtins(optimizer_section(odd))
    for key, value in msgspec.to_builtins(odd).items():
        assert found[key.replace("_updates", "_steps")] == value
