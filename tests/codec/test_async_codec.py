"""The coder: frames that travel while they are made, off the loop and off the device's thread."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
import trio

from peerd.codec import async_codec as module
from peerd.codec.async_codec import AsyncCodec
from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import encode, to_frame
from peerd.codec.layout import NotFinite
from peerd.codec.policy import CodingPlan
from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.work import Worker
from peerd.model.worker import DeviceWorker
from peerd.run.runfile import BoundarySection
from tests.worlds.machines.workers import InlineWorker

T = TypeVar("T")
LARGE = 3 << 20  # values: three chunks of codes of 8 bits


class StepWorker:
    """Runs one job for each `step`."""

    def __init__(self) -> None:
        self._steps = trio.Semaphore(0)

    def step(self) -> None:
        self._steps.release()

    @property
    def waits(self) -> bool:
        return bool(self._steps.statistics().tasks_waiting)

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0) -> T:
        await self._steps.acquire()
        return job()


@asynccontextmanager
async def coder(worker: Worker, code: str = "dynamic8") -> AsyncIterator[AsyncCodec]:
    async with trio.open_nursery() as nursery:
        found = AsyncCodec(worker, BoundarySection(code=code))  # type: ignore[arg-type]
        await nursery.start(found.run)
        yield found
        nursery.cancel_scope.cancel()


async def whole(frame: TensorFrame) -> TensorFrame:
    size = memoryview(frame.payload).nbytes
    ready = frame.ready.ready_bytes if frame.ready else size
    while frame.ready is not None and ready < size:
        ready = await frame.ready.more(ready)
    return frame


@pytest.mark.no_watchdog("codes on the loop, to be able to stop in between")
async def test_a_large_frame_is_there_before_its_payload_is() -> None:
    torch.manual_seed(1)
    values = torch.randn(LARGE)
    worker = StepWorker()
    async with coder(worker) as c:
        worker.step()
        frame = await c.encode(values, name="large")
        assert frame.ready is not None
        first = frame.ready.ready_bytes
        assert 0 < first < memoryview(frame.payload).nbytes
        worker.step()
        second = await frame.ready.more(first)
        assert second - first == 1 << 20
        worker.step()
        assert await frame.ready.more(second) == memoryview(frame.payload).nbytes
        worker.step()
        (back,) = await c.decode([frame], ["large"])
    assert float((back - values).norm() / values.norm()) < 0.012


async def test_a_small_frame_is_whole_at_once() -> None:
    async with coder(InlineWorker()) as c:
        frame = await c.encode(torch.ones(1000), name="small")
        assert frame.ready is None
        assert (frame.coding, frame.block) == ("dynamic8", 256)
        (back,) = await c.decode([frame], ["small"])
        assert torch.equal(back, torch.ones(1000))


@pytest.mark.no_watchdog("codes on the loop, to be able to stop in between")
async def test_a_frame_whose_coder_stops_says_so() -> None:
    worker = StepWorker()
    async with coder(worker) as c:
        worker.step()
        frame = await c.encode(torch.ones(LARGE), name="large")
    assert frame.ready is not None
    with pytest.raises(LocalError, match="stopped"):
        await frame.ready.more(frame.ready.ready_bytes)
    worker.step()
    with pytest.raises(LocalError, match="can be encoded only while"):
        await c.encode(torch.ones(LARGE), name="large")


async def test_what_cannot_be_coded_is_named() -> None:
    async with coder(InlineWorker()) as c:
        with pytest.raises(NotFinite, match="the output of stage 1 has NaN"):
            await c.encode(torch.full((300,), torch.nan), name="the output of stage 1")


async def test_what_cannot_be_decoded_is_named() -> None:
    async with coder(InlineWorker()) as c:
        good = await c.encode(torch.ones(1000), name="x")
        bad = replace(good, payload=b"\xff" * 4 + bytes(memoryview(good.payload))[4:])  # its first scale is NaN
        with pytest.raises(ProtocolViolation, match="the targets"):
            await c.decode([good, bad], ["the input", "the targets"])


@pytest.mark.parametrize(("rate", "coding"), [(None, "int8"), (1e6, "int8"), (5e8, "bf16"), (5e9, "none")])
async def test_the_line_decides_when_the_run_file_leaves_it_to_it(rate: float | None, coding: str) -> None:
    torch.manual_seed(2)
    async with coder(InlineWorker(), "auto") as c:
        frame = await c.encode(torch.randn(64, 1000), name="x", rate_bytes_per_s=rate)
        assert frame.coding == coding
        assert c.choices["x"].startswith(coding)
        spiky = torch.randn(64, 1000)
        spiky[:, 0] = 200.0
        frame = await c.encode(spiky, name="spiky", rate_bytes_per_s=rate)
        assert frame.coding == ("dynamic8" if coding == "int8" else coding)


async def test_the_loop_and_the_device_code_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    real_begin, real_decode = module.begin, module.decode

    def noting(real: Callable[..., T]) -> Callable[..., T]:
        def call(*args: object, **options: object) -> T:
            threads.add(threading.current_thread().name)
            return real(*args, **options)

        return call

    monkeypatch.setattr(module, "begin", noting(real_begin))
    monkeypatch.setattr(module, "decode", noting(real_decode))
    async with DeviceWorker("coding", threads=1) as worker, coder(worker) as c:
        frame = await whole(await c.encode(torch.randn(LARGE), name="large"))
        await c.decode([frame], ["large"])
    assert threads == {"peerd coding"}


TOKENS = to_frame(torch.arange(24).view(2, 12))
FOR_THE_WORKER = {
    "coded": encode(torch.randn(256), CodingPlan("int8")),
    "packed": encode(torch.zeros(4096), CodingPlan("none", lossless=True)),
    "large: it may not be aligned": to_frame(torch.zeros((1 << 16) + 1)),
    "bits to be made of bytes": to_frame(torch.ones(4, dtype=torch.bool)),
}


async def test_what_is_a_tensor_as_it_is_needs_no_thread() -> None:
    async with coder(StepWorker()) as c:  # which takes no step
        (tokens,) = await c.decode([TOKENS], ["tokens"])
        assert torch.equal(tokens, torch.arange(24).view(2, 12))
        with pytest.raises(ProtocolViolation, match="the targets has"):
            await c.decode([TOKENS, replace(TOKENS, payload=bytes(3))], ["the input", "the targets"])


@pytest.mark.parametrize("kind", FOR_THE_WORKER)
async def test_what_takes_computing_is_left_to_the_thread(kind: str) -> None:
    worker = StepWorker()
    async with coder(worker) as c, trio.open_nursery() as nursery:
        nursery.start_soon(c.decode, [TOKENS, FOR_THE_WORKER[kind]], ["the input", "the targets"])
        await trio.testing.wait_all_tasks_blocked()
        assert worker.waits
        worker.step()
