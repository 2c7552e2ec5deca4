"""Users' own loops, three at once: the parameters that one plain torch process gives, and the same bits everywhere.

What counted is read off the peers' own books at each commit: each microbatch has the samples that its user computed
last. The users start with different parameters; those of the first commit are where the plain process begins.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peerd
from peerd.messages.swarm import Mb
from peerd.model.stage.user_model import UserModel
from tests.kit.amount import some
from tests.worlds.processes.user_loops import UserLoop, own_runtime

STEPS = 10
MICROBATCH, TARGET = 4, 32
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "lamb": lambda p: peerd.Lamb(p, lr=0.01, weight_decay=0.01),
    "lars": lambda p: peerd.Lars(p, lr=0.01, trust=0.1),
}

pytestmark = [pytest.mark.slow, pytest.mark.socket]


def lr(step: int) -> float:
    return 0.05 / (1 + step)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


class Books:
    """The microbatches that each step counted, by peer, and the parameters that all had after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: dict[int, dict[Mb, torch.Tensor]] = {}
        self.digests: dict[int, set[bytes]] = {}
        self.ends: dict[UserModel, list[torch.Tensor]] = {}  # each model's parameters after the last step asked for
        self.start: list[torch.Tensor] = []
        self.current: dict[UserModel, torch.Tensor] = {}
        self.of: dict[UserModel, list[torch.Tensor]] = {}  # the parameters that each user computes with
        self.origins: dict[Mb, list[torch.Tensor]] = {}  # those that each microbatch was computed with
        self._samples: dict[tuple[UserModel, Mb], torch.Tensor] = {}
        self._lock = threading.Lock()
        add, commit = UserModel.add, UserModel.commit

        def noting_add(model: UserModel, step: int, mb: Mb, gradients: Sequence[Any], samples: int) -> bool:
            self._samples[model, mb] = self.current[model]
            self.origins[mb] = self.of[model]
            return add(model, step, mb, gradients, samples)

        def noting_commit(model: UserModel, step: int, total: Any, samples: int) -> None:
            with self._lock:
                if not self.start:
                    self.start = [p.detach().clone() for p in model._parameters]
                for mb in model.held:
                    self.batches.setdefault(step, {})[mb] = self._samples[model, mb]
            commit(model, step, total, samples)
            with self._lock:
                self.digests.setdefault(model.step, set()).add(model.digest())
                if model.step == STEPS:
                    self.ends[model] = [p.detach().clone() for p in model._parameters]

        monkeypatch.setattr(UserModel, "add", noting_add)
        monkeypatch.setattr(UserModel, "commit", noting_commit)

    def plain(
        self, make: Callable[[Any], torch.optim.Optimizer], scheduler: Any = None, clip_norm: float = 0.0
    ) -> nn.Module:
        """The same steps in one loop; the learning rate by `scheduler`, or by `lr`."""
        model = network(0)
        with torch.no_grad():
            for p, value in zip(model.parameters(), self.start, strict=True):
                p.copy_(value)
        optimizer = make(model.parameters())
        follows = scheduler(optimizer) if scheduler is not None else None
        for step in range(STEPS):
            assert len(self.batches[step]) == TARGET // MICROBATCH
            if follows is None:
                optimizer.param_groups[0]["lr"] = lr(step)
            optimizer.zero_grad()
            loss_of(model, torch.cat([x for _, x in sorted(self.batches[step].items())])).backward()
            if clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
            if follows is not None:
                follows.step()
        return model


def network(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=generator) / 3)
    return model


class User(UserLoop):
    """One user's loop, with numbers of his own."""

    def __init__(self, number: int, make: Callable[[Any], torch.optim.Optimizer], books: Books, **more: Any) -> None:
        self._books, self._data = books, torch.Generator().manual_seed(100 + number)
        self.state: dict[str, torch.Tensor] = {}
        self.model, rate = network(number), {} if "scheduler" in more else {"lr": lr}
        amounts = {"target_samples": TARGET, "samples_per_step": MICROBATCH}
        super().__init__(make(self.model.parameters()), STEPS, run="exact", **amounts, **rate, **more)

    def rows(self) -> int:
        """Samples of the next microbatch."""
        return MICROBATCH

    def backward(self) -> None:
        self.samples = self.rows()
        x = torch.randn(self.samples, 6, dtype=torch.float64, generator=self._data)
        self._books.current[self.opt._model] = x
        self._books.of[self.opt._model] = [p.detach().clone() for p in self.model.parameters()]
        loss_of(self.model, x).backward()

    def end(self) -> None:
        """Note the parameters after `STEPS`: delayed loops have begun the next step, and two may make it alone."""
        end = self._books.ends.get(self.opt._model)
        if end is not None:
            self.state = dict(zip(self.model.state_dict(), end, strict=True))
        else:
            assert self.opt.global_step == STEPS
            self.state = copy.deepcopy(self.model.state_dict())


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Books]:
    with own_runtime(tmp_path, monkeypatch):
        yield Books(monkeypatch)


def check_that_they_agree(books: Books, users: list[User]) -> None:
    for user in users:
        user.join(200)
        assert user.state, user.opt.status()
    assert all(len(digests) == 1 for digests in books.digests.values()), "peers differ"
    for user in users:
        assert {bytes.fromhex(user.opt.digest())} == books.digests[user.opt.global_step]
        assert all(torch.equal(value, users[0].state[name]) for name, value in user.state.items())
    assert len({mb.trainer for batch in books.batches.values() for mb in batch}) == len(users)


def check(books: Books, users: list[User], make: Callable[[Any], torch.optim.Optimizer], scheduler: Any = None) -> None:
    check_that_they_agree(books, users)
    for name, value in books.plain(make, scheduler).state_dict().items():
        for user in users:
            assert float((user.state[name] - value).norm() / value.norm()) <= 1e-10, name


@pytest.mark.parametrize("name", some([*OPTIMIZERS], 2))
def test_three_loops_train_like_one(name: str, books: Books) -> None:
    make = OPTIMIZERS[name]
    first = User(1, make, books, min_peers=3)
    others = [User(number, make, books, min_peers=3, bootstrap=first.address()) for number in (2, 3)]
    check(books, [first, *others], make)


class ShortOfSamples(User):
    """Its microbatches have one sample to all of them, as the last ones of an epoch."""

    def rows(self) -> int:
        return int(torch.randint(1, MICROBATCH + 1, (1,), generator=self._data))


def test_microbatches_of_fewer_samples_and_a_clipped_mean_are_one_process_with_the_same_samples(books: Books) -> None:
    make = OPTIMIZERS["adamw"]
    first = ShortOfSamples(1, make, books, min_peers=2, clip_norm=0.05)
    second = ShortOfSamples(2, make, books, min_peers=2, clip_norm=0.05, bootstrap=first.address())
    check_that_they_agree(books, [first, second])
    assert len({len(x) for batch in books.batches.values() for x in batch.values()}) > 1
    for name, value in books.plain(make, clip_norm=0.05).state_dict().items():
        assert float((first.state[name] - value).norm() / value.norm()) <= 1e-10, name


@pytest.mark.parametrize("name", some([*OPTIMIZERS], 1))
def test_a_loop_that_joins_later_takes_the_state_over_and_goes_on_exactly(name: str, books: Books) -> None:
    make = OPTIMIZERS[name]
    first = User(1, make, books, pauses=True)
    assert first.half_way.wait(200)
    second = User(2, make, books, bootstrap=first.address())
    assert second.at_work.wait(200)
    assert second.opt.global_step == STEPS // 2
    first.goes_on.set()
    check(books, [first, second], make)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "warm-up, then cosine": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 3), torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS - 3)],
        [3],
    ),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=STEPS),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", some([*SCHEDULERS], 2))
def test_torchs_schedulers_go_by_the_global_step_on_all_peers_and_on_one_that_joins_later(
    name: str, books: Books
) -> None:
    make, scheduler = OPTIMIZERS["sgd"], SCHEDULERS[name]
    first = User(1, make, books, pauses=True, scheduler=scheduler)
    assert first.half_way.wait(200)
    second = User(2, make, books, bootstrap=first.address(), scheduler=scheduler)
    assert second.at_work.wait(200)
    first.goes_on.set()
    check(books, [first, second], make, scheduler)
    rates = {user.opt.param_groups[0]["lr"] for user in (first, second)}
    assert rates == set(first.opt.scheduler.get_last_lr())


def test_loops_that_average_in_low_rank_agree_also_with_one_that_joins_later(books: Books) -> None:
    """Of the three tensors with gradients of their own, the 8 x 6 one travels in factors."""
    low_rank = {"code": "powersgd", "rank": 1}
    first = User(1, OPTIMIZERS["adamw"], books, pauses=True, **low_rank)
    assert first.half_way.wait(200)
    second = User(2, OPTIMIZERS["adamw"], books, bootstrap=first.address(), **low_rank)
    assert second.at_work.wait(200)
    first.goes_on.set()
    check_that_they_agree(books, [first, second])
    (ours,), (theirs,) = (user.opt._model.low_rank.state().values() for user in (first, second))
    assert ours.shape == (6, 1)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", some([*OPTIMIZERS], 1))
def test_delayed_loops_step_with_their_gradients_of_parameters_one_step_old_at_most(name: str, books: Books) -> None:
    make = OPTIMIZERS[name]
    first = User(1, make, books, min_peers=3, delayed=True)
    others = [User(number, make, books, min_peers=3, delayed=True, bootstrap=first.address()) for number in (2, 3)]
    users = [first, *others]
    check_that_they_agree(books, users)
    model, late = replayed(books, make)
    assert late > 0
    for name_, value in model.state_dict().items():
        for user in users:
            assert float((user.state[name_] - value).norm() / value.norm()) <= 1e-10, name_


def replayed(books: Books, make: Callable[[Any], torch.optim.Optimizer]) -> tuple[nn.Module, int]:
    """The same steps in one loop, and how many microbatches were of the parameters before the last step."""
    model, late = network(0), 0
    parameters = list(model.parameters())
    put(parameters, books.start)
    optimizer = make(parameters)
    past: list[list[torch.Tensor]] = []
    for step in range(STEPS):
        past.append([p.detach().clone() for p in parameters])
        assert len(books.batches[step]) == TARGET // MICROBATCH
        sums = [torch.zeros_like(p) for p in parameters]
        for mb, x in sorted(books.batches[step].items()):
            origin = books.origins[mb]
            old = not near(origin, past[step])
            assert not old or near(origin, past[step - 1])
            late += old
            put(parameters, origin)
            optimizer.zero_grad()
            loss_of(model, x).backward()
            for total, p in zip(sums, parameters, strict=True):
                total += p.grad / (TARGET // MICROBATCH)
        put(parameters, past[step])
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total
        optimizer.param_groups[0]["lr"] = lr(step)
        optimizer.step()
    return model, late


def near(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(float((a - b).abs().max()) <= 1e-9 for a, b in zip(one, other, strict=True))


@torch.no_grad()
def put(parameters: list[nn.Parameter], values: list[torch.Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
