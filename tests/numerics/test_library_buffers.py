"""Batch norm in users' own loops: a replica that joins late judges by its own running statistics as the others do."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import peerd

STEPS, HALF = 24, 12
MICROBATCH, TARGET = 16, 64

pytestmark = [pytest.mark.slow, pytest.mark.socket]


def batch(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes by the sign of a sum, far from zero and of large spread: fresh running statistics are wrong."""
    x = torch.randn(count, 6, generator=generator) * 40
    return x + 300, (x.sum(1) > 0).long()


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


class Loop(threading.Thread):
    """One user's loop; it pauses half way until `goes_on` is set."""

    def __init__(self, number: int, how: str, pauses: bool = False, **more: Any) -> None:
        super().__init__(daemon=True)
        self.model, self._number = network(number), number
        self.listening, self.half_way, self.goes_on = threading.Event(), threading.Event(), threading.Event()
        self.at_work = threading.Event()
        if not pauses:
            self.goes_on.set()
        self.first_look: dict[str, torch.Tensor] = {}
        self.opt = peerd.AveragingOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=0.02),
            run="norm",
            target_samples=TARGET,
            samples_per_step=MICROBATCH,
            listen=["/ip4/127.0.0.1/tcp/0"],
            model=self.model,
            buffers=how,
            announce=lambda address: self.listening.set(),
            **more,
        )
        self.start()

    def run(self) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(self._number)
        with self.opt as opt:
            self.first_look = {name: tensor.clone() for name, tensor in self.model.named_buffers()}
            self.at_work.set()
            while opt.global_step < STEPS:
                if opt.global_step >= HALF:
                    self.half_way.set()
                    assert self.goes_on.wait(200)
                x, y = batch(MICROBATCH, generator)
                nn.functional.cross_entropy(self.model(x), y).backward()
                opt.step()
                opt.zero_grad()

    def accuracy(self) -> float:
        self.model.eval()
        x, y = batch(500, torch.Generator().manual_seed(99))
        return float((self.model(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize("how", ["average", "first", "local"])
def test_a_replica_that_joins_late_has_the_running_statistics(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    tmp_path.chmod(0o700)
    first = Loop(1, how, pauses=True)
    assert first.half_way.wait(200)
    second = Loop(2, how, bootstrap=[first.opt.address])
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
