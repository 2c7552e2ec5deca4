"""Copies of parameters on a stream of their own: what waits for what. The CPU stands in for a GPU."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from peerd.core.decoders import convert
from peerd.model.stage import offload
from peerd.model.stage.stage_module import StageModule
from peerd.run.runfile import RunFile

TOKENS = torch.randint(256, (2, 8), generator=torch.Generator().manual_seed(1))


class Runtime:
    """A CUDA runtime that notes what is asked of it; `refuses` to lock memory."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses
        self.log: list[str] = []
        self.locked: dict[int, int] = {}
        self._events = 0

    # --- streams: this object stands for both of them

    def wait_stream(self, _: Any) -> None:
        self.log.append("copies wait")

    def record_event(self) -> str:
        self._events += 1
        return f"copy {self._events}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"computing waits for {event}")

    @contextlib.contextmanager
    def used(self, _: Any) -> Iterator[None]:
        self.log.append("copies begin")
        yield
        self.log.append("copies end")

    # --- memory

    def cudaHostRegister(self, address: int, nbytes: int, _: int) -> int:
        if not self.refuses:
            self.locked[address] = nbytes
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


def check_error(error: int) -> None:
    if error:
        raise RuntimeError("CUDA error: out of memory")


@pytest.fixture(params=[False, True], ids=["locked", "refused"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    found = Runtime(request.param)
    monkeypatch.setattr(offload, "has_own_memory", lambda _: True)
    monkeypatch.setattr(offload, "is_gpu", lambda _: True)
    fakes = {"Stream": lambda _: found, "current_stream": lambda _: found, "stream": found.used}
    fakes |= {"cudart": lambda: found, "check_error": check_error, "device": lambda _: contextlib.nullcontext()}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return found


def make(offload: bool) -> RunFile:
    model = {"d_model": 16, "heads": 2, "layers": 3, "context": 8}
    return convert({"run": "streams", "model": model, "limits": {"offload": offload}}, RunFile)


def test_each_layer_waits_for_its_copy_and_each_copy_for_what_was_computed_before(runtime: Runtime) -> None:
    stage, plain = StageModule(make(True), 0), StageModule(make(False), 0)
    stage.backward(TOKENS, TOKENS)
    plain.backward(TOKENS, TOKENS)
    assert torch.equal(stage.gradient(), plain.gradient())
    copy = ["copies wait", "copies begin", "copies end"]
    # embed, block0, block1, block2, head, and in the backward block2, block1, block0: a copy is begun before its layer
    expected = copy + [line for n in range(1, 8) for line in (f"computing waits for copy {n}", *copy)]
    assert runtime.log == [*expected, "computing waits for copy 8"]


def test_the_flat_parameters_are_locked_as_long_as_the_stage_is_there(runtime: Runtime) -> None:
    stage = StageModule(make(True), 0)
    flat: Tensor = stage._flat
    assert runtime.locked == ({} if runtime.refuses else {flat.data_ptr(): flat.nbytes})
    del stage
    gc.collect()
    assert runtime.locked == {}
