"""The receiving process of the transport benchmark: receives bytes in three ways, echoes, and answers calls.

It prints one JSON line with the addresses at which it listens, and ends when stdin is closed. After each bulk transfer
it sends the CPU seconds that this process spent on it.
"""

from __future__ import annotations

import struct
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial

import trio
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from peerd.core.addr import parse_addr
from peerd.wire.link.cpu import has_aes
from peerd.wire.link.link_stream import Stream
from scripts.benchmarks._remote_process import new_stack, reply, serve_echo

READ_BYTES = 1 << 18  # most that a receiver reads at once
FRAME_BYTES = 65535  # a Noise frame without its two bytes of length
TAG_BYTES = 16
CALL_BYTES = 100
TOTAL = struct.Struct(">Q")
SPENT = struct.Struct(">d")
NONCE = struct.Struct("<4xQ")
CIPHER = AESGCM if has_aes() else ChaCha20Poly1305  # the cipher that peerd's links use on this machine
KEY = bytes(32)
SINK, ECHO_STREAM = "/peerd-bench/sink/1", "/peerd-bench/echo/1"


# --- plain TCP -----------------------------------------------------------------------------------------------------
async def raw_sink(stream: trio.SocketStream) -> None:
    """Receive plain bytes."""
    (left,) = TOTAL.unpack(await stream.receive_some(TOTAL.size))
    begin = time.process_time()
    while left:
        left -= len(await stream.receive_some(READ_BYTES))
    await stream.send_all(SPENT.pack(time.process_time() - begin))


async def raw_echo(stream: trio.SocketStream) -> None:
    while data := await stream.receive_some(READ_BYTES):
        await stream.send_all(data)


async def frame_sink(stream: trio.SocketStream) -> None:
    """Receive frames of the size of Noise frames and decrypt them, without avoidable copies."""
    (left,) = TOTAL.unpack(await stream.receive_some(TOTAL.size))
    begin = time.process_time()
    cipher, count, have = CIPHER(KEY), 0, 0
    buffer = bytearray(READ_BYTES + 2 + FRAME_BYTES)
    view, plain = memoryview(buffer), memoryview(bytearray(FRAME_BYTES))
    while left:
        have += await stream.socket.recv_into(view[have : have + READ_BYTES])
        at = 0
        while have - at >= 2 and have - at - 2 >= (size := buffer[at] << 8 | buffer[at + 1]):
            cipher.decrypt_into(NONCE.pack(count), view[at + 2 : at + 2 + size], None, plain[: size - TAG_BYTES])
            count += 1
            left -= size - TAG_BYTES
            at += 2 + size
        view[: have - at] = view[at:have]
        have -= at
    await stream.send_all(SPENT.pack(time.process_time() - begin))


async def listen(serve: Callable[[trio.SocketStream], Awaitable[None]], nursery: trio.Nursery) -> int:
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(partial(trio.serve_listeners, serve, listeners))
    port: int = listeners[0].socket.getsockname()[1]
    return port


# --- peerd -----------------------------------------------------------------------------------------------------------
async def peerd_sink(stream: Stream) -> None:
    """Receive bytes without copying them, like the payloads of calls."""
    (left,) = TOTAL.unpack(await stream.receive_exactly(TOTAL.size))
    begin = time.process_time()
    while left:
        left -= len(await stream.receive_view(READ_BYTES))
    await stream.send(SPENT.pack(time.process_time() - begin))


async def peerd_echo(stream: Stream) -> None:
    while data := await stream.receive_some(READ_BYTES):
        await stream.send(data)


async def main() -> None:
    stack = new_stack()
    stack.host.handle(SINK, peerd_sink)
    stack.host.handle(ECHO_STREAM, peerd_echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(stack.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        serve_echo(stack.rpc)
        ports = {"sink": raw_sink, "echo": raw_echo, "frames": frame_sink}
        places = {name: await listen(serve, nursery) for name, serve in ports.items()}
        reply(**places, peerd=str(stack.host.addrs()[0]))
        await trio.to_thread.run_sync(sys.stdin.buffer.read)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
