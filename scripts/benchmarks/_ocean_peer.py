"""Part of the reach benchmark: a peer on one side of a long line. It prints its address, then runs one order per line.

{"do": "call", "addr": A}                  a new host calls the peer at A: seconds until the answer
{"do": "bulk", "addr": A, "seconds": S}    sends on one stream for S seconds, and makes small calls meanwhile
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from peerd.core.addr import parse_addr, split_peer
from peerd.core.ids import PeerId
from peerd.rpc.rpc import Rpc
from peerd.wire.host.host import Host
from peerd.wire.link.link_stream import Stream
from scripts.benchmarks._remote_process import ECHO, Blob, new_stack, obey, reply, serve_echo

CALL_BYTES = 100
WRITE_BYTES = 1 << 20
READ_BYTES = 1 << 18
MARK_S = 0.25  # between two marks of the bytes received
QUIET_S = 3.0  # of a bulk transfer, before the calls begin
PAUSE_S = 0.1  # between calls
SINK = "/peerd-bench/marks/1"


async def sink(stream: Stream) -> None:
    """Receive all bytes, then send the marks: [seconds since the first byte, bytes received], ..."""
    total = len(await stream.receive_view(READ_BYTES))
    began = time.perf_counter()
    marks = [(0.0, total)]
    while data := await stream.receive_view(READ_BYTES):
        total += len(data)
        now = time.perf_counter() - began
        if now >= marks[-1][0] + MARK_S:
            marks.append((now, total))
    await stream.send(json.dumps(marks).encode())


@asynccontextmanager
async def peer(*listen: str) -> AsyncIterator[tuple[Host, Rpc]]:
    """Context with a host that has a new identity."""
    stack = new_stack()
    stack.host.handle(SINK, sink)
    async with trio.open_nursery() as nursery:
        await nursery.start(stack.run, [parse_addr(addr) for addr in listen])
        serve_echo(stack.rpc)
        yield stack.host, stack.rpc
        nursery.cancel_scope.cancel()


def known(host: Host, addr: str) -> PeerId:
    bare, there = split_peer(parse_addr(addr))
    assert there is not None
    host.learn(there, [bare])
    return there


async def call_s(rpc: Rpc, there: PeerId) -> float:
    began = time.perf_counter()
    await rpc.call(there, ECHO, Blob(os.urandom(CALL_BYTES)), Blob, timeout_s=30)
    return time.perf_counter() - began


async def received(stream: Stream) -> bytes:
    parts = []
    while part := await stream.receive_some(READ_BYTES):
        parts.append(part)
    return b"".join(parts)


class LongLinePeer:
    """Orders of the benchmark."""

    async def call(self, addr: str) -> dict[str, Any]:
        async with peer() as (host, rpc):
            return {"seconds": await call_s(rpc, known(host, addr))}

    async def bulk(self, addr: str, seconds: float) -> dict[str, Any]:
        """Send for `seconds`. Returns the receiver's marks, and the seconds of the calls made meanwhile."""
        taken: list[float] = []
        async with peer() as (host, rpc):
            there = known(host, addr)
            await call_s(rpc, there)
            stream = await host.open_stream(there, SINK)
            began = trio.current_time()

            async def calls() -> None:
                await trio.sleep(QUIET_S)
                while trio.current_time() < began + seconds:
                    taken.append(await call_s(rpc, there))
                    await trio.sleep(PAUSE_S)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(calls)
                data = os.urandom(WRITE_BYTES)
                while trio.current_time() < began + seconds:
                    await stream.send(data)
                await stream.close_write()
            marks = json.loads(await received(stream))
        return {"marks": marks, "calls": taken}


async def main(listen: str) -> None:
    async with peer(listen) as (host, _):
        reply(addr=str(host.addrs()[0]))
        await obey(LongLinePeer())


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
