"""DMoE over experts in this process equals the same mixture written plainly; failures, threads, shapes, codes."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

from peerd.core.errors import ConfigError, TooFewExperts
from peerd.experts.model.dmoe import DMoE
from peerd.run.expert_network import ExpertCall
from peerd.run.grid import Uid
from peerd.run.runfile import RunFile
from tests.kit.expert_runs import WIDTH, expert_run, values
from tests.kit.local_experts import LocalExperts
from tests.kit.plain_moe import PlainMoE

MISSING = {Uid(0, at) for at in ((0, 0), (1, 2), (3, 1), (2, 2), (3, 3))}


def both(run: RunFile, missing: set[Uid] | None = None) -> tuple[DMoE, LocalExperts, PlainMoE]:
    local = LocalExperts(run, answers=lambda ask: ask.uid not in (missing or set()))
    layer = DMoE(run, 0, local)
    plain = PlainMoE(run, 0, layer.gate.weight)
    plain.missing = missing or set()
    return layer, local, plain


def assert_same(mine: Any, theirs: Any) -> None:
    """Equal to one millionth of the largest value, or of 1: float32 has seven digits."""
    largest = float(theirs.detach().abs().max())
    assert torch.allclose(mine, theirs, atol=1e-6 * max(1.0, largest), rtol=0)


def assert_same_experts(local: LocalExperts, plain: PlainMoE) -> None:
    for uid, expert in local.experts.items():
        for mine, theirs in zip(expert._module.parameters(), plain.expert(uid).parameters(), strict=True):
            assert_same(mine.detach(), theirs.detach())


SHAPES = [
    {"grid": [4, 4]},
    {"grid": [3, 2, 2], "top_k": 3},
    {"grid": [7]},
    {"block": "transformer", "input": [3, WIDTH], "heads": 2, "grid": [2, 2], "top_k": 2},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.get('block', 'ffn')}-{len(shape['grid'])}d")
@pytest.mark.parametrize("updates", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_layer_of_experts_equals_the_same_mixture_written_plainly(shape: dict[str, Any], updates: int) -> None:
    run = expert_run(**shape)
    layer, local, plain = both(run)
    for update in range(updates):
        x = values(6, *run.experts.input, seed=update)  # type: ignore[union-attr]
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        slope = 0.1 * values(*x.shape, seed=update + 100)  # about the size that a mean over samples has
        y, expected = layer(mine), plain(theirs)
        assert_same(y, expected)
        layer.zero_grad()
        plain.gate.grad = None
        y.backward(slope)
        expected.backward(slope)
        assert_same(mine.grad, theirs.grad)
        assert_same(layer.gate.weight.grad, plain.gate.grad)
        plain.step()
        assert {uid for uid, expert in local.experts.items() if expert.version} >= plain.touched
        assert_same_experts(local, plain)
    assert sum(expert.version for expert in local.experts.values()) >= updates


def test_answers_that_are_missing_leave_the_mean_and_the_gradients() -> None:
    layer, local, plain = both(expert_run(top_k=6), MISSING)
    x = values(8, WIDTH)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = layer(mine), plain(theirs)
    assert_same(y, expected)
    y.backward(slope := values(8, WIDTH, seed=5))
    expected.backward(slope)
    assert_same(mine.grad, theirs.grad)
    assert_same(layer.gate.weight.grad, plain.gate.grad)
    assert not MISSING & local.experts.keys()


def test_an_expert_whose_backward_fails_counts_as_a_constant() -> None:
    calls: list[Uid] = []

    def answers(ask: ExpertCall) -> bool:
        calls.append(ask.uid)
        return not (ask.uid in MISSING and ask.served is not None)

    run = expert_run(top_k=6)
    local = LocalExperts(run, answers=answers)
    layer = DMoE(run, 0, local)
    plain = PlainMoE(run, 0, layer.gate.weight)
    for uid in MISSING:
        for module in (plain.expert(uid),):
            module.register_forward_hook(lambda _module, _inputs, output: output.detach())
    x = values(8, WIDTH)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    slope = values(8, WIDTH, seed=5)
    layer(mine).backward(slope)
    plain(theirs).backward(slope)
    assert_same(mine.grad, theirs.grad)
    assert_same(layer.gate.weight.grad, plain.gate.grad)
    failed = MISSING & set(calls)
    assert failed
    assert all(local.expert(uid).version == 0 for uid in failed)


def test_dead_experts_are_not_chosen() -> None:
    layer, local, plain = both(expert_run())
    local.dead, plain.dead = set(MISSING), set(MISSING)
    x = values(8, WIDTH)
    assert_same(layer(x), plain(x))
    assert not MISSING & local.experts.keys()


def test_too_few_answers_are_an_error_that_names_the_experts_asked() -> None:
    run = expert_run(top_k=2, k_min=2)
    layer = DMoE(run, 0, LocalExperts(run, answers=lambda ask: ask.uid != chosen[0]))
    x = values(1, WIDTH)
    chosen = layer.choose(layer.scores(x))[0]
    with pytest.raises(TooFewExperts) as caught:
        layer(x)
    assert all(str(uid) in str(caught.value) for uid in chosen)


def test_experts_learn_even_where_the_samples_want_no_gradient() -> None:
    run = expert_run()
    local = LocalExperts(run)
    layer = DMoE(run, 0, local).requires_grad_(False)
    layer(values(4, WIDTH)).sum().backward()
    assert all(expert.version == 1 for expert in local.experts.values())


def test_without_gradients_nothing_is_updated() -> None:
    run = expert_run()
    local = LocalExperts(run)
    with torch.no_grad():
        y = DMoE(run, 0, local)(values(4, WIDTH))
    assert not y.requires_grad
    assert all(expert.version == 0 for expert in local.experts.values())


@pytest.mark.parametrize("axes", [(6,), (2, 3), (3, 1, 2)])
def test_all_axes_before_a_samples_own_are_free(axes: tuple[int, ...]) -> None:
    layer, _, _ = both(expert_run())
    x = values(6, WIDTH)
    assert torch.equal(layer(x.view(*axes, WIDTH)).view(6, WIDTH), layer(x))


def test_samples_beyond_max_batch_travel_in_several_calls() -> None:
    run = expert_run(grid=[2], top_k=2, max_batch=3)
    sizes = []

    def answers(ask: ExpertCall) -> bool:
        sizes.append(len(ask.samples))
        return True

    y = DMoE(run, 0, LocalExperts(run, answers=answers))(x := values(8, WIDTH))
    assert max(sizes) == 3
    assert sum(sizes) == 16
    assert torch.allclose(y, both(expert_run(grid=[2], top_k=2))[2](x), atol=1e-6)


def test_another_shape_is_refused_before_anything_is_asked() -> None:
    layer, local, _ = both(expert_run())
    with pytest.raises(ValueError, match=r"takes \[\.\.\., 8\], not \[3, 7\]"):
        layer(values(3, 7))
    assert not local.experts


def test_samples_that_are_not_finite_never_leave() -> None:
    layer, local, _ = both(expert_run())
    x = values(3, WIDTH)
    x[1, 2] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        layer(x)
    assert not local.experts


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 1"):
        DMoE(expert_run(), 1, LocalExperts(expert_run()))


@pytest.mark.parametrize("code", ["bf16", "fp16", "dynamic8", "int8"])
def test_codes_change_outputs_and_gradients_only_a_little(code: str) -> None:
    found = []
    for run in (expert_run(), expert_run(code=code)):
        layer, _, _ = both(run)
        x = values(16, WIDTH).requires_grad_()
        y = layer(x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad))
    for exact, coded in zip(*found, strict=True):
        assert float((exact - coded).norm() / exact.norm()) < 0.15
        assert not torch.equal(exact, coded)


def test_bfloat16_works_from_end_to_end() -> None:
    run = expert_run(dtype="bfloat16")
    layer, local, plain = both(run)
    x = values(8, WIDTH, dtype=torch.bfloat16).requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert torch.allclose(y.float(), plain(x.detach().float()), atol=0.1)
    assert all(expert.version == 1 for expert in local.experts.values())


@pytest.mark.slow
def test_threads_may_be_inside_at_once_and_keep_their_own_balance() -> None:
    run = expert_run(balance=1.0, optimizer={"lr": 1e-12})  # updates that change nothing: threads come in any order
    layer, _, plain = both(run)
    inside = threading.Barrier(4)
    found: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def work(number: int) -> None:
        x = values(5, WIDTH, seed=number).requires_grad_()
        y = layer(x)
        inside.wait(200)  # all four have their forward in flight
        balance = layer.balance_loss
        (slope,) = torch.autograd.grad(y.sum(), x)
        found[number] = y.detach(), slope, balance.detach()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        x = values(5, WIDTH, seed=number).requires_grad_()
        expected = plain(x)
        y, slope, balance = found[number]
        assert torch.allclose(y, expected, atol=1e-6)
        assert torch.allclose(slope, torch.autograd.grad(expected.sum(), x)[0], atol=1e-6)
        layer(x)
        assert torch.allclose(balance, layer.balance_loss)
    assert len({float(balance) for *_, balance in found.values()}) == 4


def test_the_balancing_loss_pushes_the_gate() -> None:
    run = expert_run(balance=0.5)
    layer, _, _ = both(run)
    layer(values(8, WIDTH))
    layer.balance_loss.backward()
    assert layer.gate.weight.grad is not None
    assert layer.gate.weight.grad.any()
    silent, _, _ = both(expert_run(balance=0.0))
    silent(values(8, WIDTH))
    assert float(silent.balance_loss) == 0


def test_the_gate_begins_the_same_for_one_seed_and_layer() -> None:
    run = expert_run(layers=2)
    local = LocalExperts(run)
    first, again, other = DMoE(run, 0, local), DMoE(run, 0, local), DMoE(run, 1, local)
    assert torch.equal(first.gate.weight, again.gate.weight)
    assert not torch.equal(first.gate.weight, other.gate.weight)


def test_only_the_gate_is_a_parameter_of_the_layer() -> None:
    layer, _, _ = both(expert_run())
    assert list(layer.state_dict()) == ["gate.weight"]
    assert copy.copy(layer).gate is layer.gate
