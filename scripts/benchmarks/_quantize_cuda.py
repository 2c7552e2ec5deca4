"""Blockwise quantization on a GPU, compared with the bound given by the memory rate of a plain copy.

Input and output are far larger than the caches of a GPU. Many calls are queued between two events, so that the host's
launch overhead does not count. The candidates take turns, and the median round of each counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
import trio
from torch import Tensor

from peerd.codec.async_codec import AsyncCodec
from peerd.codec.format.blockwise import CODES
from peerd.codec.format.frame import TensorFrame
from peerd.codec.kernels import ops
from peerd.model.worker import DeviceWorker
from peerd.run.runfile import BoundarySection
from scripts.benchmarks._quantize_cpu import CALLS_PER_BATCH, Coded, Way, all_codes, over_copy
from scripts.benchmarks._quantize_cpu import median_seconds as host_seconds

BESIDE = ("none", "bf16", "dynamic8")
WIDTH: Final = 6144  # of the product, which takes some milliseconds in single precision
VALUES: Final = 4 << 20  # that are encoded: 16 MiB


def measured(count: int, rounds: int, repeats: int) -> dict[str, Any] | None:
    """Figures for float32 values, for bfloat16 under "bf16", and the implementation. Returns None without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    return {
        "device": torch.cuda.get_device_name(device),
        "implementation": implementation(device),
        "values": count,
        **rates(torch.randn(count, device=device), rounds, repeats),
        "bf16": rates(torch.randn(count, device=device, dtype=torch.bfloat16), rounds, repeats),
        "call_us": call_us(device, rounds),
        "beside_computing": beside_computing(BESIDE, rounds),
    }


def implementation(device: torch.device) -> str:
    """Name of the implementation: the kernels, or plain torch with the reason."""
    from peerd.codec.kernels import cuda

    return "kernels" if cuda.available(device) else f"plain torch: {cuda.why_not(device)}"


def rates(x: Tensor, rounds: int, repeats: int) -> dict[str, Any]:
    """GB/s of a copy (read plus written), and of each code (input only), with its share of the possible rate."""
    out = torch.zeros_like(x)
    rooms = all_codes(x, out)
    ways: dict[str, Way] = {"copy": partial(out.copy_, x)}
    for room in rooms:
        ways |= room.ways(ops.best(x.device))
    seconds = median_seconds(ways, rounds, repeats)
    copy_gb_s = 2 * x.nbytes / 1e9 / seconds["copy"]
    gb_s = {name: x.nbytes / 1e9 / second for name, second in seconds.items()}
    figures: dict[str, Any] = {"copy_gb_s": copy_gb_s}
    for code, room in zip(CODES, rooms, strict=True):
        figures[code] = over_copy(gb_s, code, gb_s["copy"]) | over_bound(room, seconds, copy_gb_s)
    return figures


def call_us(device: torch.device, batches: int) -> dict[str, float]:
    """Overhead of one call on the host in microseconds: with 64 values, into existing buffers."""
    x = torch.ones(64, device=device)
    room = next(room for room in all_codes(x, torch.zeros_like(x)) if room.code == "int8")
    seconds = host_seconds(room.ways(ops.best(device)), batches, CALLS_PER_BATCH)
    return {name.removeprefix("int8 "): 1e6 * took for name, took in seconds.items()}


def over_bound(room: Coded, seconds: Mapping[str, float], copy_gb_s: float) -> dict[str, float]:
    """Share of the possible rate: time to move input, codes and scales at the copy's rate, over the measured time."""
    least_s = (room.x.nbytes + room.codes.nbytes + room.scales.nbytes) / 1e9 / copy_gb_s
    return {
        f"{direction}_over_bound": least_s / seconds[f"{room.code} {direction}"]
        for direction in ("quantize", "dequantize")
    }


def median_seconds(ways: Mapping[str, Way], rounds: int, repeats: int) -> dict[str, float]:
    """Median device time of one call of each candidate. The first round is a warm-up, also of the GPU's clocks."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(rounds + 1):
        for name, way in ways.items():
            way()  # one-time costs, before the measurement
            begin.record()
            for _ in range(repeats):
                way()
            end.record()
            end.synchronize()
            if number:
                took[name].append(begin.elapsed_time(end) / 1000 / repeats)
    return {name: statistics.median(times) for name, times in took.items()}


# --- beside computing -------------------------------------------------------------------------------------------------
def beside_computing(
    codes: tuple[str, ...], rounds: int, device: str = "cuda", width: int = WIDTH
) -> dict[str, dict[str, float]]:
    """Milliseconds, by code: of a matrix product, of encoding, of decoding, and of a product while the last one's
    result is encoded and copied to the host (`both_ms`), by a stage peer's worker and codec. With a single CUDA stream,
    the times would add up.
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
