"""Buffers of a user's model: shared alike, given to newcomers, averaged by samples; alone they are plain torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from peerd.core.errors import ConfigError
from peerd.messages.swarm import Mb
from peerd.model.stage.served_stage import items_of, state_of
from peerd.model.stage.shared_buffers import GradientNotFinite, buffers_of
from peerd.model.stage.user_model import UserModel
from peerd.run.runfile import AveragingSection


class Net(nn.Module):
    """A batch norm, a buffer that is put anew each time, and one that is none of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(x)
        return self.norm(x)


def peer(how: str = "average", dtype: torch.dtype = torch.float64, **more: Any) -> tuple[Net, UserModel]:
    net = Net().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = UserModel(optimizer, net.named_parameters(), buffers=(buffers_of(net), how), **more)
    model.here()
    return net, model


def data(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2 + seed


def compute(net: Net, model: UserModel, seq: int, seed: int) -> None:
    net(data(seed)).square().mean().backward()
    gradients = model.gradients()
    model.check_finite(gradients)
    assert model.add(model.step, Mb("a", seq), gradients, 4)


def buffers(net: Net) -> dict[str, torch.Tensor]:
    return {
        name: tensor.clone() for name, tensor in net.state_dict().items() if name not in dict(net.named_parameters())
    }


def commit(models: list[UserModel], samples: int) -> None:
    """One round: the sum of all parts, and all step with it."""
    total = np.sum([model.vector(leads=place == 0) for place, model in enumerate(models)], axis=0)
    for model in models:
        model.commit(model.step, total, samples)


def test_alone_they_are_those_of_a_plain_loop() -> None:
    (net, model), plain = peer(), Net().double()
    for step in range(3):
        for seq in range(2):
            compute(net, model, seq, 10 * step + seq)
            plain(data(10 * step + seq))
        commit([model], 8)
    for name, tensor in buffers(plain).items():
        assert torch.allclose(buffers(net)[name].double(), tensor.double(), atol=1e-12), name
    assert net.norm.num_batches_tracked == 6
    assert net.seen == 24


def test_the_average_is_weighted_by_samples_and_all_have_the_same_bits() -> None:
    (one, first), (two, second) = peer(), peer()
    compute(one, first, 0, 1)
    for seq in range(3):
        compute(two, second, seq, 2 + seq)
    ours, theirs = buffers(one), buffers(two)
    commit([first, second], 16)
    for name, tensor in buffers(one).items():
        assert torch.equal(tensor, buffers(two)[name])
        expected = ours[name].double() / 4 + theirs[name].double() * 3 / 4
        assert torch.allclose(tensor.double(), expected if tensor.is_floating_point() else expected.round()), name
    assert first.here() == second.here()


def test_the_first_ones_win_where_that_is_wished() -> None:
    (one, first), (two, second) = peer("first"), peer("first")
    compute(one, first, 0, 1)
    compute(two, second, 0, 2)
    ours = buffers(one)
    commit([first, second], 8)
    for net in (one, two):
        assert all(torch.allclose(tensor, ours[name]) for name, tensor in buffers(net).items())
    compute(two, second, 0, 3)  # the first one has no part in this step
    commit([first, second], 4)
    assert all(torch.allclose(tensor, ours[name]) for name, tensor in buffers(two).items())


def test_local_ones_stay_each_peers_own_and_a_newcomer_begins_with_the_average() -> None:
    (one, first), (two, second), (new, third) = peer("local"), peer("local"), peer("local")
    compute(one, first, 0, 1)
    compute(two, second, 0, 2)
    before = buffers(one), buffers(two)
    commit([first, second], 8)
    assert all(torch.equal(tensor, before[0][name]) for name, tensor in buffers(one).items())
    assert all(torch.equal(tensor, before[1][name]) for name, tensor in buffers(two).items())
    assert first.here() == second.here(), "what is shared is alike: donors agree"
    third.load(state_of(items_of(first.state())))
    assert torch.allclose(new.norm.running_mean, (one.norm.running_mean + two.norm.running_mean) / 2)  # type: ignore[operator]
    second.load(state_of(items_of(first.state())))  # one that was late takes the state, and keeps its own
    assert all(torch.equal(tensor, before[1][name]) for name, tensor in buffers(two).items())


@pytest.mark.parametrize("how", ["average", "first"])
def test_a_newcomer_has_what_the_others_have_and_goes_on_with_them(how: str) -> None:
    (one, first), (new, second) = peer(how), peer(how)
    for step in range(3):
        compute(one, first, 0, step)
        commit([first], 4)
    described = items_of(first.state())
    assert [(x.name, x.dtype, x.shape) for x in second.outline()] == [item[:3] for item in described]
    assert "buffer/norm.running_var" in {item[0] for item in described}
    assert "buffer/cache" not in {item[0] for item in described}
    second.load(state_of(described))
    assert all(torch.equal(tensor, buffers(one)[name]) for name, tensor in buffers(new).items())
    compute(new, second, 0, 9)
    commit([first, second], 4)
    assert first.here() == second.here()


def test_weights_that_are_loaded_before_the_start_are_where_it_begins() -> None:
    net, model = peer()
    with torch.no_grad():
        net.norm.running_mean.fill_(5)  # type: ignore[union-attr]
    before = model.state()["buffer/norm.running_mean"]
    model.here()
    assert torch.equal(model.state()["buffer/norm.running_mean"], before + 5)


def test_a_sum_that_is_forgotten_forgets_what_was_seen() -> None:
    net, model = peer()
    compute(net, model, 0, 1)
    model.keep_only(0, [])
    assert not model.vector().any()


def test_in_a_delayed_run_early_looks_count_in_their_own_step() -> None:
    net, model = peer(delayed=True)
    compute(net, model, 0, 1)
    net(data(2)).sum().backward()
    early = buffers(net)
    assert model.add(1, Mb("a", 1), model.gradients(), 4)
    commit([model], 4)
    assert net.norm.num_batches_tracked == 1
    commit([model], 4)
    assert all(torch.allclose(tensor, early[name]) for name, tensor in buffers(net).items())


def test_in_low_rank_they_travel_whole() -> None:
    net, model = peer(averaging=AveragingSection(code="powersgd", rank=1))
    assert model.low_rank is not None
    compute(net, model, 0, 1)
    model.low_rank.begin(model.vector())
    assert model.low_rank.elements[0] == len(model.vector())


def test_what_cannot_be_kept_alike_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="buffers is 'mean'; allowed: average, first, local"):
        peer("mean")
    with pytest.raises(ConfigError, match=r"code 'int8' is too coarse for buffers .seen, .*bf16"):
        peer(averaging=AveragingSection(code="int8"))
    net, model = peer()
    net.register_buffer("late", torch.zeros(1))
    with pytest.raises(ConfigError, match="buffer late was added after the start"):
        compute(net, model, 0, 1)
    net, model = peer()
    net(data(1)).sum().backward()
    net.norm.running_var[1] = float("inf")  # type: ignore[index]
    with pytest.raises(GradientNotFinite, match=r"buffer norm\.running_var of the model is not finite"):
        model.check_finite(model.gradients())
    assert peer()[1].model_text() != peer("local")[1].model_text()
