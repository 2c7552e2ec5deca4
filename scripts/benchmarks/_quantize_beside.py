"""Encoding on a GPU during computation: matrix products alone, and while each result is encoded and copied to the host.

Uses the worker and the codec of a stage peer. With a single CUDA stream, the times would add up.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import torch
import trio
from torch import Tensor

from peerd.compute.codec.async_codec import AsyncCodec
from peerd.compute.worker import DeviceWorker
from peerd.core.frame import TensorFrame
from peerd.core.run.runfile import BoundarySection

WIDTH: Final = 6144  # of the product, which takes some milliseconds in single precision
VALUES: Final = 4 << 20  # that are encoded: 16 MiB


def measured(
    codes: tuple[str, ...], rounds: int, device: str = "cuda", width: int = WIDTH
) -> dict[str, dict[str, float]]:
    """Milliseconds, by code: of a product, of encoding, of decoding, and of a product with encoding its result
    (`both_ms`).
    """
    return {code: trio.run(_of_code, code, rounds, device, width) for code in codes}


async def _of_code(code: str, rounds: int, name: str, width: int) -> dict[str, float]:
    async with (
        DeviceWorker(name) as device,
        DeviceWorker("coding", threads=1) as coding,
        trio.open_nursery() as nursery,
    ):
        coder = AsyncCodec(coding, BoundarySection(code=code), name)  # type: ignore[arg-type]
        await nursery.start(coder.run)
        scene = _Scene(device, coder, width)
        await scene.prepare()
        ways: dict[str, Callable[[], Awaitable[object]]] = {
            "compute_ms": scene.product,
            "encode_ms": partial(scene.encode, scene.values),
            "decode_ms": partial(coder.decode, [scene.frame], ["values"]),
        }
        found = {name: await _ms_of(way, rounds) for name, way in ways.items()}
        began = time.perf_counter()
        async with trio.open_nursery() as beside:
            for _ in range(rounds):
                beside.start_soon(scene.encode, await scene.product())
        found["both_ms"] = 1e3 * (time.perf_counter() - began) / rounds
        nursery.cancel_scope.cancel()
    return found


async def _ms_of(way: Callable[[], Awaitable[object]], rounds: int) -> float:
    began = time.perf_counter()
    for _ in range(rounds):
        await way()
    return 1e3 * (time.perf_counter() - began) / rounds


class _Scene:
    """A matrix, values that depend on its product, and their encoded frame."""

    values: Tensor
    frame: TensorFrame

    def __init__(self, device: DeviceWorker, coder: AsyncCodec, width: int) -> None:
        self._device, self._coder, self._width = device, coder, width

    async def prepare(self) -> None:
        """Create the tensors, and run each operation once, so that one-time costs are not measured."""
        name, width = self._device.device, self._width
        self._factor = await self._device.run(lambda: torch.randn(width, width, device=name), name="a factor")
        self._values = await self._device.run(lambda: torch.randn(VALUES, device=name), name="values")
        self.values = await self.product()
        self.frame = await self.encode(self.values)
        await self._coder.decode([self.frame], ["values"])

    async def product(self) -> Tensor:
        return await self._device.run(lambda: self._values + (self._factor @ self._factor)[0, 0], name="a product")

    async def encode(self, values: Tensor) -> TensorFrame:
        """Encode values, and wait for the whole frame."""
        frame = await self._coder.encode(values, name="values")
        ready, at = frame.ready, 0
        while ready is not None and at < memoryview(frame.payload).nbytes:
            at = await ready.more(at)
        return frame
