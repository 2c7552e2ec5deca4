"""Training loops of users, each in a thread: `peerd.AveragingOptimizer` over TCP on loopback."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import peerd

WITHIN_S: Final = 200.0  # for whatever a test waits for
_loops: list[UserLoop] = []  # of the test under way


@contextlib.contextmanager
def own_runtime(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let peers of this process put their control sockets into `folder`; at the end, end the loops that are left."""
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    _loops.clear()
    yield
    for loop in _loops:
        loop.goes_on.set()
        loop.opt.close()
        loop.join(WITHIN_S)


class UserLoop(threading.Thread):
    """One user's loop of so many steps. With `pauses` it waits half way until `goes_on` is set."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, pauses: bool = False, **settings: Any) -> None:
        """`settings`: those of the AveragingOptimizer."""
        super().__init__(daemon=True)
        self.steps = steps
        self.samples: int | None = None  # of the microbatch under way; None: as many as were agreed on
        self.listening, self.at_work, self.half_way, self.goes_on = (threading.Event() for _ in range(4))
        if not pauses:
            self.goes_on.set()
        told, listen = (lambda address: self.listening.set()), ["/ip4/127.0.0.1/tcp/0"]
        self.opt = peerd.AveragingOptimizer(optimizer, listen=listen, announce=told, **settings)
        _loops.append(self)
        self.start()

    def begin(self) -> None:
        """Called when the optimizer has joined the run."""

    def backward(self) -> None:
        """Compute the gradients of a microbatch."""
        raise NotImplementedError

    def end(self) -> None:
        """Called before the optimizer leaves the run."""

    def run(self) -> None:
        torch.set_num_threads(1)
        with self.opt as opt:
            self.begin()
            self.at_work.set()
            while opt.global_step < self.steps:
                if opt.global_step >= self.steps // 2:
                    self.half_way.set()
                    assert self.goes_on.wait(WITHIN_S)
                self.backward()
                opt.step(samples=self.samples)
                opt.zero_grad()
            self.end()

    def address(self) -> list[str]:
        assert self.listening.wait(WITHIN_S)
        return [self.opt.address]
