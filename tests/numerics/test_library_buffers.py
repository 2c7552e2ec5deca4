"""Batch norm in users' own loops: a replica that joins late judges by its own running statistics as the others do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.worlds.processes.user_loops import UserLoop, own_runtime

STEPS = 24
MICROBATCH, TARGET = 16, 64

pytestmark = [pytest.mark.slow, pytest.mark.socket]


def batch(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes by the sign of a sum, far from zero and of large spread: fresh running statistics are wrong."""
    x = torch.randn(count, 6, generator=generator) * 40
    return x + 300, (x.sum(1) > 0).long()


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


class Loop(UserLoop):
    """One user's loop, which notes the running statistics that it begins with."""

    def __init__(self, number: int, how: str, **more: Any) -> None:
        self._data = torch.Generator().manual_seed(number)
        self.first_look: dict[str, torch.Tensor] = {}
        self.model = network(number)
        settings = {"target_samples": TARGET, "samples_per_step": MICROBATCH, "model": self.model, "buffers": how}
        super().__init__(torch.optim.Adam(self.model.parameters(), lr=0.02), STEPS, run="norm", **settings, **more)

    def begin(self) -> None:
        self.first_look = {name: tensor.clone() for name, tensor in self.model.named_buffers()}

    def backward(self) -> None:
        x, y = batch(MICROBATCH, self._data)
        nn.functional.cross_entropy(self.model(x), y).backward()

    def accuracy(self) -> float:
        self.model.eval()
        x, y = batch(500, torch.Generator().manual_seed(99))
        return float((self.model(x).argmax(1) == y).float().mean())


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with own_runtime(tmp_path, monkeypatch):
        yield


@pytest.mark.parametrize("how", ["average", "first", "local"])
def test_a_replica_that_joins_late_has_the_running_statistics(how: str, runtime: None) -> None:
    first = Loop(1, how, pauses=True)
    assert first.half_way.wait(200)
    second = Loop(2, how, bootstrap=first.address())
    assert second.at_work.wait(200)
    assert 200 < float(second.first_look["0.running_mean"].mean()) < 400, "it begins with what the others have"
    first.goes_on.set()
    for loop in (first, second):
        loop.join(200)
    print(how, [loop.accuracy() for loop in (first, second)])
    assert min(loop.accuracy() for loop in (first, second)) > 0.9
    assert first.opt.digest() == second.opt.digest()
    ours, theirs = (dict(loop.model.named_buffers()) for loop in (first, second))
    alike = all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert alike == (how != "local")
