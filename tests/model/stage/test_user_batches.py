"""What of a batch is known besides its sum: unused parameters, microbatches that are short, the norm of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peerd.codec.format.blockwise import CODES
from peerd.codec.frames import CodingPlan, decode, encode
from peerd.core.errors import ConfigError
from peerd.messages.swarm import Mb
from peerd.model.stage.user_model import UserModel
from peerd.run.runfile import AveragingSection
from tests.kit.user_models import OPTIMIZERS, fill, module, user


class Towers(nn.Module):
    """A network with a frozen layer, and with a head for each of two tasks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen, self.body = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()
        self.heads = nn.ModuleList(nn.Linear(3, 1).double() for _ in range(3))
        self.frozen.requires_grad_(False)

    def loss(self, x: Tensor, task: int) -> Tensor:
        loss: Tensor = self.heads[task](self.body(self.frozen(x)).tanh()).square().mean()
        return loss


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_frozen_and_unused_parameters_are_left_alone_as_by_plain_torch(name: str) -> None:
    """Two peers with a task each; the last head is used by nobody, and the second one not in every step."""
    peers, plain = [Towers(), Towers()], Towers()
    models = [UserModel(OPTIMIZERS[name](p.parameters()), p.named_parameters()) for p in peers]
    optimizer = OPTIMIZERS[name](plain.parameters())
    for step in range(4):
        tasks = (0, step % 2)
        x = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for peer, model, task, batch in zip(peers, models, tasks, x, strict=True):
            peer.zero_grad()
            peer.loss(batch, task).backward()
            model.add(step, Mb("a", step), model.gradients(), samples=4)
        whole = models[0].vector() + models[1].vector()
        for model in models:
            model.commit(step, whole, samples=8)
        optimizer.zero_grad()
        (sum(plain.loss(batch, task) for task, batch in zip(tasks, x, strict=True)) / 2).backward()  # type: ignore[attr-defined]
        optimizer.step()
    for peer in peers:
        for (key, ours), theirs in zip(peer.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12, msg=key)
    first = Towers().state_dict()
    for key in ("frozen.weight", "frozen.bias", "heads.2.weight", "heads.2.bias"):
        assert torch.equal(peers[0].state_dict()[key], first[key])


@pytest.mark.parametrize("code", ["int8", "nf4", "bf16", "powersgd"])
def test_no_code_loses_a_parameter_or_brings_one_that_had_no_gradient(code: str) -> None:
    averaging = AveragingSection(code=code)  # type: ignore[arg-type]
    plan = CodingPlan("none" if code == "powersgd" else code, 0)
    many = [nn.Parameter(torch.ones(7)) for _ in range(9)]
    model = UserModel(torch.optim.SGD(many, lr=1.0), averaging=averaging, microbatch=32)
    gradients: list[Tensor | None] = [torch.full((7,), 1e-6) if i % 3 else None for i in range(9)]
    model.add(0, Mb("a", 0), gradients, samples=20)
    sent = decode(encode(torch.from_numpy(model.vector()), plan), name="a sum")
    close = torch.tensor([2e-5 if i % 3 else 0.0 for i in range(9) for _ in range(7)])
    assert torch.allclose(sent[: len(close)], close, rtol=0.1, atol=0)
    model.commit(0, sent.numpy(), 32)
    moved = [not torch.equal(p.detach(), torch.ones(7)) for p in many]
    assert moved == [gradient is not None for gradient in gradients]
    assert float(many[1].detach()[0]) == pytest.approx(1 - 1e-6, abs=2e-7)


@pytest.mark.parametrize("code", sorted(CODES))
def test_no_code_changes_the_number_of_samples_in_a_batch(code: str) -> None:
    """Three peers whose microbatches are short, the last one of many; parts and their sum travel coded."""
    averaging, plan = AveragingSection(code=code), CodingPlan(code, 0)  # type: ignore[arg-type]

    def coded(vector: Tensor) -> Tensor:
        return decode(encode(vector, plan), name="a sum")

    models = []
    for samples in (1, 27, 5):
        model = UserModel(torch.optim.SGD([nn.Parameter(torch.ones(7))], lr=1.0), averaging=averaging, microbatch=32)
        for seq in range(7 if samples == 5 else 1):
            model.add(0, Mb("a", seq), [torch.full((7,), 1e-6)], samples)
        models.append(model)
    whole = coded(sum(coded(torch.from_numpy(model.vector())) for model in models))  # type: ignore[arg-type]
    tail = models[0]._tail
    views = models[0]._total.views(whole)
    assert tail.read(views, 9 * 32) == ([True], 1 + 27 + 7 * 5)


def test_microbatches_of_fewer_samples_weigh_less() -> None:
    m, model = user(OPTIMIZERS["sgd"], microbatch=4)
    start = [p.detach().clone() for p in m.parameters()]
    means = []
    for seq, samples in enumerate((4, 1, 3)):
        fill(m, seq)
        means.append((samples, [p.grad.clone() for p in m.parameters()]))  # type: ignore[union-attr]
        assert model.add(0, Mb("a", seq), model.gradients(), samples)
    model.commit(0, model.vector(), samples=12)
    for index, (p, before) in enumerate(zip(m.parameters(), start, strict=True)):
        whole = sum(samples * grads[index] for samples, grads in means) / 8
        torch.testing.assert_close(p.detach(), before - 0.1 * whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("clip_norm", [0.5, 100.0])
def test_the_norm_of_the_whole_mean_is_clipped_as_by_torch(clip_norm: float) -> None:
    m, model = user(OPTIMIZERS["adam"], clip_norm=clip_norm)
    plain = module()
    optimizer = OPTIMIZERS["adam"](plain.parameters())
    for step in range(3):
        gradients = []
        for seq in range(2):
            fill(m, 10 * step + seq)
            gradients.append([p.grad.clone() for p in m.parameters()])  # type: ignore[union-attr]
            model.add(step, Mb("a", seq), model.gradients(), samples=1)
        model.commit(step, model.vector(), samples=2)
        for p, one, other in zip(plain.parameters(), *gradients, strict=True):
            p.grad = (one + other) / 2
        torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        optimizer.step()
    for ours, theirs in zip(m.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_sparse_gradients_are_refused_by_name() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    model = UserModel(torch.optim.SGD(table.parameters(), lr=0.1), table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="the gradient of weight is sparse: only dense ones can be averaged"):
        model.gradients()
