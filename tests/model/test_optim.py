"""Optimizers and learning rate against torch's own. LAMB and LARS: test_optim_papers.py."""

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

LAYOUT = FlatLayout(("a", "b", "c"), (torch.Size([3, 4]), torch.Size([5]), torch.Size([])))


def random(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(LAYOUT.count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.slow  # torch.optim imports half of torch when it is first used
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("clip_norm", [0.0, 1.5])
@pytest.mark.parametrize(
    "section",
    [
        OptimizerSection(name="adamw", lr=0.02),
        OptimizerSection(name="adamw", lr=0.02, weight_decay=0.1, beta1=0.8, beta2=0.99, eps=1e-6),
        OptimizerSection(name="sgd", lr=0.02),
        OptimizerSection(name="sgd", lr=0.02, momentum=0.9, weight_decay=0.1),
    ],
)
def test_adamw_and_sgd_are_torchs(
    section: OptimizerSection, clip_norm: float, dtype: torch.dtype, tolerance: float
) -> None:
    section = msgspec.structs.replace(section, clip_norm=clip_norm)
    mine, theirs = random(0, dtype), torch.nn.Parameter(random(0, dtype))
    ours = Optimizer(section, LAYOUT, mine)
    reference: torch.optim.Optimizer
    if section.name == "sgd":
        reference = torch.optim.SGD(
            [theirs], lr=section.lr, momentum=section.momentum, weight_decay=section.weight_decay
        )
    else:
        betas = (section.beta1, section.beta2)
        reference = torch.optim.AdamW(
            [theirs], lr=section.lr, betas=betas, eps=section.eps, weight_decay=section.weight_decay
        )
    for step in range(20):
        gradient = random(step + 1, dtype)
        theirs.grad = gradient.clone()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([theirs], clip_norm * (1 + 1e-6 / float(gradient.norm())))
        reference.step()
        ours.update(mine, gradient, step)
        torch.testing.assert_close(mine, theirs.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lars"])
def test_making_an_optimizer_changes_no_parameter(name: str) -> None:
    parameters = random(0)
    optimizer = Optimizer(OptimizerSection(name=name, weight_decay=0.5, momentum=0.9), LAYOUT, parameters)  # type: ignore[arg-type]
    assert torch.equal(parameters, random(0))
    assert all(not moment.any() for moment in optimizer.moments.values())


class Elsewhere(torch.Tensor):
    """As if on another device: `to` gives a copy."""

    def to(self, *_: object, **__: object) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lars"])
def test_offloading_gives_the_bits_of_the_cpu(name: str) -> None:
    section = OptimizerSection(name=name, lr=0.1, momentum=0.9, weight_decay=0.1, clip_norm=2.0)  # type: ignore[arg-type]
    run = {}
    for offload in (False, True):
        parameters = random(0, torch.float32)
        optimizer = Optimizer(msgspec.structs.replace(section, offload=offload), LAYOUT, parameters)
        if offload:
            parameters = parameters.as_subclass(Elsewhere)
        for step in range(5):
            optimizer.update(parameters, random(step + 1, torch.float32), step)
        run[offload] = parameters.as_subclass(torch.Tensor)
    assert torch.equal(run[False], run[True])
    assert not torch.equal(run[True], random(0, torch.float32))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lars"])
def test_offloading_from_a_gpu_gives_the_bits_of_the_cpu(name: str) -> None:
    section = OptimizerSection(name=name, lr=0.1, momentum=0.9, weight_decay=0.1, clip_norm=2.0, offload=True)  # type: ignore[arg-type]
    here, there = random(0, torch.float32), random(0, torch.float32).cuda()
    ours, theirs = Optimizer(section, LAYOUT, here), Optimizer(section, LAYOUT, there)
    assert all(moment.device.type == "cpu" for moment in theirs.moments.values())
    for step in range(5):
        ours.update(here, random(step + 1, torch.float32), step)
        theirs.update(there, random(step + 1, torch.float32), step)
    assert torch.equal(here, there.cpu())


def test_the_layouts_views_are_the_flat_tensor_itself() -> None:
    flat = torch.arange(float(LAYOUT.count))
    a, b, c = LAYOUT.views(flat)
    assert (a.shape, b.shape, c.shape) == LAYOUT.shapes
    c.fill_(-1)
    assert flat[-1] == -1


def test_the_learning_rate_warms_up_and_decays() -> None:
    section = OptimizerSection(lr=1.0, warmup_steps=4, total_steps=14, decay="linear", final_lr_share=0.2)
    rates = [learning_rate(section, step) for step in range(20)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[9] == pytest.approx(0.6)
    assert rates[14:] == pytest.approx([0.2] * 6)
    cosine = msgspec.structs.replace(section, decay="cosine")
    assert learning_rate(cosine, 9) == pytest.approx(0.6)
    assert learning_rate(cosine, 6) > learning_rate(section, 6)
    assert learning_rate(msgspec.structs.replace(section, decay="none"), 100) == 1.0


@settings(max_examples=examples(30))
@given(
    step=st.integers(0, 1000),
    warmup=st.integers(0, 100),
    decay=st.sampled_from(["none", "linear", "cosine"]),
    share=st.floats(0, 1),
)
def test_the_learning_rate_is_never_negative_nor_above_the_given(
    step: int, warmup: int, decay: str, share: float
) -> None:
    section = OptimizerSection(lr=0.5, warmup_steps=warmup, total_steps=warmup + 50, decay=decay, final_lr_share=share)  # type: ignore[arg-type]
    assert 0 <= learning_rate(section, step) <= 0.5 * (1 + 1e-12)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_memory_for_an_update_is_taken_before_anything_is_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, gradient = random(0), random(1)
    optimizer = Optimizer(OptimizerSection(name=name), LAYOUT, parameters)  # type: ignore[arg-type]
    optimizer.update(parameters, gradient.clone(), 0)
    before = [tensor.clone() for tensor in (parameters, *optimizer.moments.values())]

    def no_memory(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty_like", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.update(parameters, gradient.clone(), 1)
    for tensor, old in zip((parameters, *optimizer.moments.values()), before, strict=True):
        assert torch.equal(tensor, old)
