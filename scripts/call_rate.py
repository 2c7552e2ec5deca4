"""Measures small calls between two processes on loopback: median time of one call, and calls per second.

`python scripts/call_rate.py` prints one JSON object: call_ms_median (100 B, one at a time) and calls_per_s_64 (64 in
flight), each the best of several rounds, because other load only ever makes them worse. `measure` is for other scripts.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import trio

from peerd.core.addr import parse_addr
from peerd.core.keys import Keypair
from peerd.core.messages import Message
from peerd.net.clock import RealClock
from peerd.net.host import Host
from peerd.net.tcp import TcpTransport
from peerd.service.rpc import Answer, Incoming, Rpc

METHOD = "bench/1/echo"


class Blob(Message, frozen=True):
    """Bytes that come back."""

    data: bytes


async def _echo(call: Incoming[Blob]) -> Answer[Blob]:
    return Answer(call.body)


def _peer() -> tuple[Host, Rpc]:
    clock = RealClock(None)
    host = Host(Keypair.generate(clock.secure_bytes), clock, [TcpTransport()])
    return host, Rpc(host, clock)


async def _serve() -> None:
    """The server process: prints its address, serves until its standard input ends."""
    host, rpc = _peer()
    rpc.serve(METHOD, Blob, _echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(rpc.run)
        await nursery.start(host.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        print(host.addrs()[0], flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        nursery.cancel_scope.cancel()


async def _measure(address: str, seconds: float) -> dict[str, Any]:
    host, rpc = _peer()
    async with trio.open_nursery() as nursery:
        await nursery.start(rpc.run)
        await nursery.start(host.run)
        peer = await host.connect_addr(parse_addr(address))
        body = Blob(random.Random(1).randbytes(100))

        async def call() -> None:
            await rpc.call(peer, METHOD, body, Blob, timeout_s=10)

        async def loop(end: float, times: list[float]) -> None:
            while (start := time.perf_counter()) < end:
                await call()
                times.append(time.perf_counter() - start)

        await loop(time.perf_counter() + 0.3, [])
        medians, rates = [], []
        for _ in range(3):
            times: list[float] = []
            await loop(time.perf_counter() + seconds / 6, times)
            medians.append(statistics.median(times) * 1000)
            many: list[float] = []
            start = time.perf_counter()
            async with trio.open_nursery() as callers:
                for _ in range(64):
                    callers.start_soon(loop, start + seconds / 6, many)
            rates.append(len(many) / (time.perf_counter() - start))
        nursery.cancel_scope.cancel()
    return {"call_ms_median": round(min(medians), 3), "calls_per_s_64": round(max(rates))}


def measure(seconds: float = 6.0) -> dict[str, Any]:
    """Both figures, measured for about so long against a server process of its own."""
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, __file__, "--serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            return trio.run(_measure, server.stdout.readline().strip(), seconds)
        finally:
            server.stdin.close()


if __name__ == "__main__":
    if "--serve" in sys.argv:
        trio.run(_serve)
    else:
        print(json.dumps(measure()))
