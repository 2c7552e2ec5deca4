"""Any torch optimizer as a peer's own: sums gradients, steps with the mean, hands its state to newcomers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from peerd.core.errors import ConfigError
from peerd.messages.swarm import Mb
from peerd.model.stage.microbatch_books import Stale
from peerd.model.stage.served_stage import items_of, state_of
from peerd.model.stage.shared_buffers import GradientNotFinite
from peerd.model.stage.user_model import UserModel
from tests.kit.user_models import OPTIMIZERS, fill, mean, module, total, user


class Counting(torch.optim.SGD):
    """Keeps a plain number, and nothing else, for each parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                p.data.sub_(p.grad, alpha=1 / self.state[p]["count"])


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """The first optimizer of a process imports half of torch."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_making_one_touches_neither_parameters_nor_optimizer(name: str) -> None:
    m = module()
    optimizer = OPTIMIZERS[name](m.parameters())
    fill(m, 1)
    before, inner = copy.deepcopy(m.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [p.grad for p in m.parameters()]
    UserModel(optimizer, m.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), m.state_dict().values(), strict=True))
    assert str(inner) == str(optimizer.state_dict())
    assert all(a is p.grad for a, p in zip(gradients, m.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_commit_is_a_step_with_the_mean(name: str) -> None:
    m, model = user(OPTIMIZERS[name])
    plain = module()
    optimizer = OPTIMIZERS[name](plain.parameters())
    for step in range(3):
        fill(m, step)
        fill(plain, step)
        mb = Mb("a", step)
        assert model.add(step, mb, model.gradients(), samples=4)
        kept = [p.grad for p in m.parameters()]
        model.commit(step, model.vector(), samples=4)
        assert all(a is p.grad for a, p in zip(kept, m.parameters(), strict=True))
        optimizer.step()
    assert model.step == 3
    assert all(torch.equal(a, b) for a, b in zip(m.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("name", [*OPTIMIZERS, "counting"])
def test_a_newcomer_goes_on_bit_for_bit(name: str, steps: int) -> None:
    make = {**OPTIMIZERS, "counting": lambda p: Counting(p, lr=0.1)}[name]
    (_, giver), (_, taker) = user(make, seed=1), user(make, seed=2)
    for step in range(steps):
        giver.commit(step, mean(giver, step), 2)
    described = items_of(giver.state())
    assert [(s.name, s.dtype, s.shape) for s in taker.outline()] == [item[:3] for item in described]
    taker.load(state_of(described))
    assert (taker.step, taker.digest()) == (steps, giver.digest())
    assert taker.here() == giver.here()
    for step in range(steps, steps + 2):
        for model in (giver, taker):
            model.commit(step, mean(giver, step), 2)
    assert taker.digest() == giver.digest()
    assert taker.here() == giver.here()


def test_a_state_of_before_the_first_step_takes_back_what_an_optimizer_has_made() -> None:
    (_, giver), (_, taker) = user(OPTIMIZERS["sgd with momentum"], 1), user(OPTIMIZERS["sgd with momentum"], 2)
    taker.commit(0, mean(taker, 0), 1)
    taker.load(giver.state())
    for model in (giver, taker):
        model.commit(0, mean(giver, 1), 1)
    assert taker.digest() == giver.digest()


@pytest.mark.parametrize("fault", ["name", "shape", "dtype", "nan", "step"])
def test_a_state_that_does_not_fit_changes_nothing(fault: str) -> None:
    _, model = user(OPTIMIZERS["adamw"])
    state = model.state()
    before = model.here()
    if fault == "name":
        state["param/other"] = state.pop("param/0.bias")
    elif fault == "shape":
        state["param/0.bias"] = torch.zeros(7, dtype=torch.float64)
    elif fault == "dtype":
        state["param/0.bias"] = state["param/0.bias"].float()
    elif fault == "nan":
        state["opt/2.weight/exp_avg"][0, 0] = float("nan")
    else:
        state["step"] = torch.tensor(-1)
    with pytest.raises(ValueError, match="state"):
        model.load(state)
    assert model.here() == before


def test_microbatches_count_once_weighted_by_their_samples() -> None:
    m, model = user(OPTIMIZERS["sgd"])
    fill(m, 1)
    first = torch.cat([p.grad.reshape(-1) for p in m.parameters() if p.grad is not None])
    for _ in range(2):
        assert model.add(0, Mb("a", 1), model.gradients(), samples=4)
    next(m.parameters()).grad = None
    assert model.add(0, Mb("a", 2), model.gradients(), samples=4)
    second = first.clone()
    second[: next(m.parameters()).numel()] = 0
    assert np.array_equal(model.vector(), total(model, 4 * first + 4 * second))
    assert model.held == [Mb("a", 1), Mb("a", 2)]


def test_what_cannot_be_taken_out_is_computed_anew_with_the_rest() -> None:
    m, model = user(OPTIMIZERS["sgd"])
    fill(m, 1)
    for seq in range(3):
        model.add(0, Mb("a", seq), model.gradients(), samples=4)
    assert model.keep_only(0, [Mb("a", 2), Mb("a", 9)]) == [Mb("a", 9)]
    assert len(model.held) == 3
    assert model.keep_only(0, [Mb("a", 0), Mb("a", 1)]) == [Mb("a", 0), Mb("a", 1)]
    assert model.held == []
    assert not model.vector().any()
    assert model.keep_only(0, []) == []


def test_a_gradient_that_is_not_finite_is_left_out() -> None:
    m, model = user(OPTIMIZERS["sgd"])
    fill(m, 1)
    next(m.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
    assert not model.add(0, Mb("a", 1), model.gradients(), samples=4)
    assert not model.vector().any()
    with pytest.raises(Stale):
        model.add(1, Mb("a", 1), model.gradients(), samples=4)


def test_what_is_not_finite_is_named() -> None:
    m, model = user(OPTIMIZERS["sgd"])
    fill(m, 1)
    model.check_finite(model.gradients())
    m[0].bias.grad[1:3] = float("nan")  # type: ignore[index]
    with pytest.raises(
        GradientNotFinite, match=r"the gradient of 0\.bias is not finite \(2 of 4 values\); nothing was contributed"
    ):
        model.check_finite(model.gradients())
    for p in m.parameters():
        p.grad = torch.full_like(p, float("inf"))
    words = r"of 0\.weight is not finite \(20 of 20 values\), and of 0\.bias, 2\.weight and 1 more; nothing"
    with pytest.raises(FloatingPointError, match=words):
        model.check_finite(model.gradients())


def test_settings_that_others_than_the_schedule_change_are_noticed() -> None:
    _, model = user(OPTIMIZERS["sgd"])
    scheduler = torch.optim.lr_scheduler.StepLR(model._optimizer, 1, 0.5)
    model.check_unchanged()
    model._optimizer.step()
    scheduler.step()
    with pytest.raises(
        ConfigError, match=r"lr of the optimizer's group 0 was 0\.1 and is 0\.05 now: peers would differ\. Pass a.*"
    ):
        model.check_unchanged()
    model.settings_changed()
    model.check_unchanged()


def test_half_precision_is_summed_in_single() -> None:
    p = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    model = UserModel(torch.optim.SGD([p], lr=1.0))
    p.grad = torch.full((3,), 1.0, dtype=torch.bfloat16)
    for seq in range(300):  # bfloat16 would stop at 256
        model.add(0, Mb("a", seq), model.gradients(), samples=1)
    model.commit(0, model.vector(), 300)
    assert p.dtype == torch.bfloat16
    assert p.tolist() == [-1.0] * 3


def test_the_learning_rate_follows_the_global_step() -> None:
    seen: list[int] = []

    def lr(step: int) -> float:
        seen.append(step)
        return 0.5 / (step + 1)

    p = nn.Parameter(torch.zeros(1))
    model = UserModel(torch.optim.SGD([p], lr=7.0), lr=lr)
    for step in range(2):
        model.commit(step, total(model, torch.ones(1)), 1)
    assert seen == [0, 1]
    assert p.item() == pytest.approx(-0.75)


def test_what_the_users_code_raises_is_kept_and_ends_it() -> None:
    m, model = user(OPTIMIZERS["sgd"], lr=lambda step: 1 / step)
    fill(m, 1)
    kept = [p.grad for p in m.parameters()]
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        model.commit(0, mean(model, 0), 1)
    assert isinstance(model.failure, ZeroDivisionError)
    assert all(a is p.grad for a, p in zip(kept, m.parameters(), strict=True))


def test_a_scheduler_that_has_replaced_step_is_not_rehearsed() -> None:
    m = module()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 3)
    fill(m, 1)
    before = copy.deepcopy(m.state_dict())
    UserModel(optimizer, m.named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(before.values(), m.state_dict().values(), strict=True))
    assert not optimizer.state


class KeepsList(Counting):
    def step(self, closure: Any = None) -> None:
        self.state[self.param_groups[0]["params"][0]]["history"] = []


class KeepsElsewhere(Counting):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.LBFGS(p), "needs a closure"),
        (lambda p: torch.optim.SparseAdam(p), "SparseAdam cannot step with an average, which is dense: .*not support"),
        (lambda p: KeepsList(p, lr=0.1), "history as list"),
        (lambda p: KeepsElsewhere(p, lr=0.1), "group 0's k outside"),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.zeros(1))], lr=0.1), "not in named_parameters"),
        (lambda p: "adam", "a torch optimizer is needed, not str"),
    ],
)
def test_what_cannot_be_averaged_is_refused_in_words(make: Any, words: str) -> None:
    m = module()
    with pytest.raises(ConfigError, match=words):
        UserModel(make(m.parameters()), m.named_parameters())


def test_names_and_dtypes_are_checked() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="two parameters are named 'x'"):
        UserModel(torch.optim.SGD([a, b], lr=0.1), [("x", a), ("x", b)])
    c = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="cannot be averaged"):
        UserModel(torch.optim.SGD([c], lr=0.1))


def test_changed_parameters_and_missing_gradients_are_noticed() -> None:
    _, model = user(OPTIMIZERS["sgd"])
    with pytest.raises(ConfigError, match="no parameter has a gradient"):
        model.gradients()
    model.check_unchanged()
    model._optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="have changed"):
        model.check_unchanged()


def test_the_texts_tell_runs_apart() -> None:
    def texts(make: Callable[[Any], torch.optim.Optimizer], **more: Any) -> tuple[str, str]:
        _, model = user(make, **more)
        return model.model_text(), model.optimizer_text()

    adam = texts(OPTIMIZERS["adamw"])
    assert "0.weight [4, 5] float64" in adam[0]
    assert adam == texts(OPTIMIZERS["adamw"], seed=9)
    assert adam[1] != texts(lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)))[1]
    assert adam[1] != texts(lambda p: torch.optim.AdamW(p, lr=0.02))[1]

    def lr(step: int) -> float:
        return 0.1

    assert texts(OPTIMIZERS["adamw"], lr=lr) == texts(lambda p: torch.optim.AdamW(p, lr=9.0, foreach=False), lr=lr)


def test_a_tensor_without_values_is_no_trouble() -> None:
    p, empty = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(0, 3))
    giver, taker = (UserModel(torch.optim.AdamW([p, empty], lr=0.1)) for _ in range(2))
    taker.load(state_of(items_of(giver.state())))
    gradients: list[Tensor | None] = [torch.ones(2), None]
    assert taker.add(0, Mb("a", 0), gradients, 1)


def test_in_a_delayed_run_early_gradients_are_a_sum_of_their_own_and_the_next_one_s_beginning() -> None:
    m, model = user(OPTIMIZERS["sgd"], delayed=True)
    fill(m, 1)
    first = model.gradients()
    assert model.add(0, Mb("a", 1), first, 2)
    due = model.vector()
    fill(m, 2)
    second = model.gradients()
    assert model.add(1, Mb("a", 2), second, 2)
    assert model.add(1, Mb("a", 2), second, 2)
    assert (model.held, model.early) == ([Mb("a", 1)], [Mb("a", 2)])
    assert np.array_equal(model.vector(), due)
    with pytest.raises(Stale):
        model.add(2, Mb("a", 3), second, 2)
    model.commit(0, mean(model, 3), 2)
    assert (model.held, model.early) == ([Mb("a", 2)], [])
    assert np.array_equal(model.vector(), total(model, torch.cat([2 * p.grad.reshape(-1) for p in m.parameters()])))
    assert model.keep_only(1, [Mb("b", 9)]) == [Mb("b", 9)]
    model.add(1, Mb("a", 4), second, 2)
    assert model.keep_only(1, [Mb("a", 2)]) == [Mb("a", 2)]  # it cannot be taken apart: all is computed anew
    assert (model.held, model.vector().any()) == ([], False)


def test_without_delay_an_early_gradient_is_refused() -> None:
    m, model = user(OPTIMIZERS["sgd"])
    fill(m, 1)
    with pytest.raises(Stale):
        model.add(1, Mb("a", 1), model.gradients(), 2)
