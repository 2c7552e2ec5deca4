"""A stream's rate and CPU time, and small calls, compared with plain trio TCP and with Noise frames without a muxer.

Two processes on loopback, with 1 MiB writes and the same read size for all. The candidates take turns in many short
rounds, and the median round counts, so that other load on the machine affects all of them equally; the ratios are
reliable. CPU seconds are those of both processes. Calls have 100 bytes there and back.
"""

from __future__ import annotations

import os
import statistics
import struct
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from peerd.core.addr import parse_addr
from peerd.core.ids import PeerId
from peerd.rpc.rpc import Rpc
from peerd.wire.host.host import Host
from scripts.benchmarks._far import (
    CALL_BYTES,
    CIPHER,
    ECHO_STREAM,
    FRAME_BYTES,
    KEY,
    NONCE,
    SINK,
    SPENT,
    TAG_BYTES,
    TOTAL,
)
from scripts.benchmarks._remote_process import ECHO, Blob, RemoteProcess, module, new_stack
from scripts.benchmarks._report import Figure, Report

WRITE_BYTES = 1 << 20
BATCH_FRAMES = 17  # frames per send of the baseline: a whole write, which was the fastest
IN_FLIGHT = 64
LENGTH = struct.Struct(">H")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Extent of the measurement."""

    rounds: int
    bulk_bytes: int
    calls: int  # one at a time, per round
    flood_s: float  # with IN_FLIGHT calls at once, per round


QUICK = Sizes(rounds=24, bulk_bytes=64 << 20, calls=300, flood_s=0.4)
FULL = Sizes(rounds=60, bulk_bytes=128 << 20, calls=500, flood_s=1.0)


@dataclass(frozen=True, slots=True)
class Bulk:
    """Result of one transfer."""

    mb_s: float
    cpu_s_per_gb: float  # both processes


@dataclass(frozen=True, slots=True)
class Near:
    """This process' connections to the other one."""

    ports: dict[str, int]
    host: Host
    rpc: Rpc
    peer: PeerId


Transfer = Callable[[memoryview, int], Awaitable[float]]  # (data of one write, writes) -> CPU seconds of the receiver


async def timed(transfer: Transfer, data: memoryview, sizes: Sizes) -> Bulk:
    writes = sizes.bulk_bytes // WRITE_BYTES
    wall, cpu = time.perf_counter(), time.process_time()
    far_s = await transfer(data, writes)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    gigabytes = writes * WRITE_BYTES / 1e9
    return Bulk(1000 * gigabytes / wall, (cpu + far_s) / gigabytes)


async def raw_transfer(port: int, data: memoryview, writes: int) -> float:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(TOTAL.pack(writes * WRITE_BYTES))
        for _ in range(writes):
            await stream.send_all(data)
        return float(SPENT.unpack(await stream.receive_some(SPENT.size))[0])


async def frame_transfer(port: int, data: memoryview, writes: int) -> float:
    """Send Noise frames without a muxer, encrypted into one buffer per write."""
    cipher, count = CIPHER(KEY), 0
    out = memoryview(bytearray(BATCH_FRAMES * (2 + FRAME_BYTES)))
    most = FRAME_BYTES - TAG_BYTES
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(TOTAL.pack(writes * WRITE_BYTES))
        for _ in range(writes):
            end = 0
            for at in range(0, WRITE_BYTES, most):
                plain = data[at : at + most]
                size = len(plain) + TAG_BYTES
                LENGTH.pack_into(out, end, size)
                cipher.encrypt_into(NONCE.pack(count), plain, None, out[end + 2 : end + 2 + size])
                count += 1
                end += 2 + size
            await stream.send_all(out[:end])
        return float(SPENT.unpack(await stream.receive_some(SPENT.size))[0])


async def peerd_transfer(near: Near, data: memoryview, writes: int) -> float:
    stream = await near.host.open_stream(near.peer, SINK)
    await stream.send(TOTAL.pack(writes * WRITE_BYTES))
    for _ in range(writes):
        await stream.send(data)
    spent = float(SPENT.unpack(await stream.receive_exactly(SPENT.size))[0])
    await stream.aclose()
    return spent


# --- calls -----------------------------------------------------------------------------------------------------------
async def median_ms(once: Callable[[], Awaitable[object]], count: int) -> float:
    """Median of `count` calls. A third as many before are a warm-up, since the bulk transfer has emptied the caches."""
    for _ in range(count // 3):
        await once()
    took: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        await once()
        took.append(time.perf_counter() - begin)
    return 1000 * statistics.median(took)


async def raw_round_trip_ms(port: int, count: int) -> float:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        stream.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)

        async def once() -> None:
            await stream.send_all(bytes(CALL_BYTES))
            left = CALL_BYTES
            while left:
                left -= len(await stream.receive_some(left))

        return await median_ms(once, count)


async def one_call(near: Near) -> None:
    await near.rpc.call(near.peer, ECHO, Blob(bytes(CALL_BYTES)), Blob, timeout_s=10)


async def one_stream(near: Near) -> None:
    """Open a stream, echo 100 bytes, and close it: a call without the RPC layer."""
    stream = await near.host.open_stream(near.peer, ECHO_STREAM)
    await stream.send(bytes(CALL_BYTES))
    await stream.receive_exactly(CALL_BYTES)
    await stream.aclose()


async def flood_per_s(once: Callable[[], Awaitable[object]], seconds: float) -> float:
    """Calls per second with IN_FLIGHT concurrent calls."""
    done = 0

    async def again_and_again() -> None:
        nonlocal done
        while True:
            await once()
            done += 1

    begin = time.perf_counter()
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            for _ in range(IN_FLIGHT):
                nursery.start_soon(again_and_again)
    return done / (time.perf_counter() - begin)


# --- the run ---------------------------------------------------------------------------------------------------------
async def run_rounds(near: Near, sizes: Sizes) -> dict[str, list[Any]]:
    """Measurements of all rounds, by candidate. The candidates take turns."""
    data = memoryview(os.urandom(WRITE_BYTES))
    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "raw": partial(timed, partial(raw_transfer, near.ports["sink"]), data, sizes),
        "frames": partial(timed, partial(frame_transfer, near.ports["frames"]), data, sizes),
        "peerd": partial(timed, partial(peerd_transfer, near), data, sizes),
        "raw_ms": partial(raw_round_trip_ms, near.ports["echo"], sizes.calls),
        "call_ms": partial(median_ms, partial(one_call, near), sizes.calls),
        "stream_ms": partial(median_ms, partial(one_stream, near), sizes.calls),
        "calls_per_s": partial(flood_per_s, partial(one_call, near), sizes.flood_s),
    }
    taken: dict[str, list[Any]] = {name: [] for name in ways}
    for number in range(sizes.rounds + 1):
        for name, way in ways.items():
            found = await way()
            taken[name] += [found] if number else []  # the first round warms up
    return taken


async def with_peerd(places: dict[str, Any], sizes: Sizes) -> dict[str, list[Any]]:
    stack = new_stack()
    async with trio.open_nursery() as nursery:
        await nursery.start(stack.run)
        peer = await stack.host.connect_addr(parse_addr(places["peerd"]))
        rounds = await run_rounds(Near(places, stack.host, stack.rpc, peer), sizes)
        nursery.cancel_scope.cancel()
    return rounds


def measured(sizes: Sizes) -> dict[str, list[Any]]:
    far = RemoteProcess(subprocess.Popen, module("_far"))
    try:
        return trio.run(with_peerd, far.answer(), sizes)
    finally:
        far.end()


def measure(full: bool) -> Report:
    sizes = FULL if full else QUICK
    rounds = measured(sizes)
    bulks = [rounds[name] for name in ("raw", "frames", "peerd")]
    raw, frames, peerd = (statistics.median(bulk.mb_s for bulk in each) for each in bulks)
    cpu_raw, cpu_frames, cpu_peerd = (statistics.median(bulk.cpu_s_per_gb for bulk in each) for each in bulks)
    names = ("call_ms", "raw_ms", "stream_ms", "calls_per_s")
    call_ms, raw_ms, stream_ms, calls_per_s = (statistics.median(rounds[name]) for name in names)
    bulk = [
        Figure("stream_mb_s", "one peerd stream", peerd, "MB/s", 0),
        Figure("raw_tcp_mb_s", "plain trio TCP", raw, "MB/s", 0),
        Figure("noise_frames_mb_s", "Noise frames without muxer", frames, "MB/s", 0),
        Figure("stream_over_raw", "peerd stream / plain TCP", peerd / raw, at_least=0.50),
        Figure("noise_frames_over_raw", "Noise frames / plain TCP: what ciphers allow here", frames / raw),
        Figure("stream_over_noise_frames", "peerd stream / Noise frames", peerd / frames, at_least=0.85),
    ]
    cpu = [
        Figure("cpu_s_per_gb", "CPU seconds per GB, both ends", cpu_peerd, "s", at_most=2.2),
        Figure("raw_tcp_cpu_s_per_gb", "the same, plain trio TCP", cpu_raw, "s"),
        Figure("noise_frames_cpu_s_per_gb", "the same, Noise frames without muxer", cpu_frames, "s"),
    ]
    calls = [
        Figure("call_ms_median", "100 B call, one at a time, median", call_ms, "ms", 3, at_most=0.4),
        Figure("raw_round_trip_ms_median", "plain trio TCP, 100 B there and back", raw_ms, "ms", 3),
        Figure("call_over_raw_round_trip", "call / plain round trip", call_ms / raw_ms),
        Figure("stream_call_ms_median", "new stream, 100 B there and back", stream_ms, "ms", 3),
        Figure("calls_per_s_64", "calls a second, 64 in flight", calls_per_s, "", 0, at_least=6000),
    ]
    note = f"two processes on loopback, 1 MiB writes, median of {sizes.rounds} alternating rounds"
    return Report("transport", [bulk, cpu, calls], note)
