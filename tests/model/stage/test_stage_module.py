"""One stage at work: what it refuses, what a refusal leaves unchanged, and that equal inputs give equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.codec.gpu import wake
from peerd.core.errors import ConfigError
from peerd.model.changes import ParametersLost
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import ModelSection, OptimizerSection, PipelineSection, RunFile

RUN = RunFile(
    run="module",
    model=ModelSection(d_model=16, heads=2, layers=3, context=8),
    pipeline=PipelineSection(stages=3, microbatch=2),
    optimizer=OptimizerSection(lr=0.01),
)
TOKENS = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(1))
HIDDEN = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=[0, 1, 2], ids=["first", "middle", "last"])
def stage(request: pytest.FixtureRequest) -> StageModule:
    return StageModule(RUN, request.param)


def pair(stage: StageModule) -> tuple[Tensor, Tensor]:
    """The arguments of `backward` of this stage: input, and targets or output gradient."""
    return (TOKENS if stage.first else HIDDEN), (TOKENS if stage.last else HIDDEN)


def with_value(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[3] = value
    return changed


def test_two_peers_start_with_the_same_bits(stage: StageModule) -> None:
    torch.manual_seed(99)
    assert StageModule(RUN, stage.stage).digest() == stage.digest()


@pytest.mark.parametrize("bad", ["rank", "width", "dtype", "too long", "empty", "value", "infinite"])
def test_a_bad_input_is_refused_in_words_and_changes_nothing(stage: StageModule, bad: str) -> None:
    x, target = pair(stage)
    if bad == "rank":
        x = x[0]
    elif bad == "width":
        x = x[..., :-1] if not stage.first else x[..., None].expand(2, 8, 15)
    elif bad == "dtype":
        x = x.to(torch.int32 if stage.first else torch.float64)
    elif bad == "too long":
        x, target = torch.cat((x, x), 1), torch.cat((target, target), 1)
    elif bad == "empty":
        x, target = x[:0], target[:0]
    elif stage.first:
        x = with_value(x, 256 if bad == "value" else -1)
    else:
        x = with_value(x, float("nan") if bad == "value" else float("inf"))
    for call in (lambda: stage.forward(x), lambda: stage.backward(x, target)):
        with pytest.raises(ValueError, match=r"stage|the input") as caught:
            call()
        assert len(str(caught.value)) < 200
    assert not stage.gradient().any()


@pytest.mark.parametrize("bad", ["rank", "other length", "dtype", "value", "infinite"])
def test_a_bad_gradient_or_target_is_refused_in_words_and_changes_nothing(stage: StageModule, bad: str) -> None:
    x, target = pair(stage)
    if bad == "rank":
        target = target[0]
    elif bad == "other length":
        target = target[:, :-1]
    elif bad == "dtype":
        target = target.to(torch.int32 if stage.last else torch.float64)
    elif stage.last:
        target = with_value(target, 1000 if bad == "value" else -5)
    else:
        target = with_value(target, float("nan") if bad == "value" else float("-inf"))
    with pytest.raises(ValueError, match=r"the targets|the output's gradient"):
        stage.backward(x, target)
    assert not stage.gradient().any()


def test_a_gradient_that_overflows_is_not_accumulated() -> None:
    stage = StageModule(RUN, 1)
    stage.backward(HIDDEN, HIDDEN)
    before = stage.gradient()
    with pytest.raises(ValueError, match="the gradient of this microbatch has values that are not finite"):
        stage.backward(HIDDEN, torch.full_like(HIDDEN, 3e38))
    assert torch.equal(stage.gradient(), before)


def test_only_the_last_stage_takes_targets() -> None:
    with pytest.raises(ValueError, match="stage 0 is not the last stage"):
        StageModule(RUN, 0).loss(TOKENS, TOKENS)


def test_the_inputs_of_the_caller_are_left_as_they_are(stage: StageModule) -> None:
    x, target = (tensor.clone() for tensor in pair(stage))
    stage.forward(x)
    stage.backward(x, target)
    assert not x.requires_grad
    assert torch.equal(x, pair(stage)[0])
    assert torch.equal(target, pair(stage)[1])


def test_backward_with_the_same_microbatch_gives_the_same_bits_again(stage: StageModule) -> None:
    first, second = (stage.backward(*pair(stage)) for _ in range(2))
    assert first[1] == second[1]
    if not stage.first:
        assert first[0] is not None
        assert second[0] is not None
        assert torch.equal(first[0], second[0])
    once = StageModule(RUN, stage.stage)
    once.backward(*pair(stage))
    assert torch.equal(stage.gradient(), 2 * once.gradient())


def test_a_sign_changes_what_is_added_and_not_what_is_returned(stage: StageModule) -> None:
    added, added_loss = stage.backward(*pair(stage))
    taken, taken_loss = stage.backward(*pair(stage), sign=-1.0)
    assert not stage.gradient().any()
    assert added_loss == taken_loss
    assert stage.first or torch.equal(added, taken)  # type: ignore[arg-type]


def test_the_gradient_is_a_copy_and_clear_forgets(stage: StageModule) -> None:
    stage.backward(*pair(stage))
    copy = stage.gradient()
    stage.clear()
    assert copy.any()
    assert not stage.gradient().any()


def test_a_step_moves_the_parameters_and_clears_the_accumulator(stage: StageModule) -> None:
    before = stage.state()
    stage.backward(*pair(stage))
    mean = stage.gradient() / 2
    kept = mean.clone()
    stage.apply(mean)
    assert torch.equal(mean, kept)
    assert stage.step == 1
    assert not stage.gradient().any()
    after = stage.state()
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("param/"))


def test_a_mean_gradient_that_does_not_fit_is_refused_before_the_step(stage: StageModule) -> None:
    digest, fits = stage.digest(), stage.gradient()
    for bad in (fits[:-1], fits.double(), with_value(fits, float("nan"))):
        with pytest.raises(ValueError, match="the mean gradient"):
            stage.apply(bad)
    assert stage.digest() == digest


def test_a_state_is_a_copy_with_stable_names() -> None:
    stage = StageModule(RUN, 1)
    state = stage.state()
    assert "param/block1.attention.qkv.weight" in state
    assert "opt/block1.attention.qkv.weight/exp_avg_sq" in state
    assert state["step"].dtype == torch.int64
    digest = stage.digest()
    for tensor in state.values():
        tensor.zero_()
    assert stage.digest() == digest


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed(stage: StageModule) -> None:
    stage.backward(*pair(stage))
    stage.apply(stage.gradient())
    digest, name = stage.digest(), next(iter(stage.state()))
    fresh = StageModule(RUN, stage.stage).state()
    cases = {
        f"the state lacks {name}": {n: t for n, t in fresh.items() if n != name},
        "the state has the unknown param/x": fresh | {"param/x": torch.zeros(1)},
        rf"{name} is \[1\] float32; expected \[": fresh | {name: torch.zeros(1)},
        f"{name} is .* float64; expected .* float32": fresh | {name: fresh[name].double()},
        f"{name} has values that are not finite": fresh | {name: with_value(fresh[name], float("nan"))},
        "step is -1": fresh | {"step": torch.tensor(-1)},
        r"step is \[\] float32": fresh | {"step": torch.tensor(1.0)},
    }
    for words, state in cases.items():
        with pytest.raises(ValueError, match=words):
            stage.load_state(state)
        assert stage.digest() == digest


def test_a_loaded_state_is_a_copy_and_clears_the_accumulator(stage: StageModule) -> None:
    state = stage.state()
    other = StageModule(RUN, stage.stage)
    other.backward(*pair(stage))
    other.apply(other.gradient())
    other.backward(*pair(stage))
    other.load_state(state)
    assert (other.step, other.digest()) == (0, stage.digest())
    assert not other.gradient().any()
    next(iter(state.values())).zero_()
    assert other.digest() == stage.digest()


def test_a_stage_that_the_run_does_not_have_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="stage 3 does not exist: the run has stages 0 to 2"):
        StageModule(RUN, 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.slow
def test_a_gpu_computes_what_the_cpu_computes(stage: StageModule) -> None:
    wake("cuda")
    gpu = StageModule(RUN, stage.stage, "cuda")
    assert gpu.digest() == stage.digest()
    for piece in (gpu, stage):
        piece.backward(*pair(stage))
    torch.testing.assert_close(gpu.gradient().cpu(), stage.gradient(), rtol=1e-3, atol=1e-4)
    gpu.apply(stage.gradient() / 2)
    stage.apply(stage.gradient() / 2)
    for name, tensor in gpu.state().items():
        torch.testing.assert_close(tensor, stage.state()[name], rtol=1e-4, atol=1e-6)


def test_nothing_is_computed_with_parameters_that_a_failed_step_left_behind(
    stage: StageModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, mean = stage.state(), torch.ones(stage.total.count)
    stage.apply(mean)
    expected = stage.digest()
    stage.load_state(whole)
    update = stage._optimizer.update

    def fails_after(*args: Any) -> None:
        update(*args)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(stage._optimizer, "update", fails_after)
    with pytest.raises(torch.OutOfMemoryError):
        stage.apply(mean)
    monkeypatch.undo()
    for use in (lambda: stage.forward(TOKENS if stage.first else HIDDEN), lambda: stage.backward(*pair(stage))):
        with pytest.raises(ParametersLost):
            use()
    for use in (stage.state, stage.digest, lambda: stage.apply(mean)):
        with pytest.raises(ParametersLost):
            use()
    stage.load_state(whole)
    stage.apply(mean)
    assert stage.digest() == expected


def test_a_step_that_finds_no_memory_at_its_start_has_changed_nothing(
    stage: StageModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, mean = stage.digest(), torch.ones(stage.total.count)

    def no_memory(*_: Any, **__: Any) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty_like", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        stage.apply(mean)
    monkeypatch.undo()
    assert stage.digest() == before
