"""A go-libp2p peer under remote control: drives the daemon `p2pd` and speaks the same JSON lines as the other two.

    python go_peer.py /path/to/p2pd [-flag=value ...]        flags of p2pd's own, which win over those used here

Commands are described in tests/worlds/processes/foreign.py. The daemon's control protocol is protobuf, each message
behind a varint length, over a unix socket; a stream that was opened or accepted is that socket itself from then on.
p2pd has no half-closed streams: it drops both directions when one ends, so the sender closes last.
The daemon is started here and killed when stdin ends. It stays on loopback: no port mapping, no bootstrap peers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial

import base58
import trio
from multiaddr import Multiaddr

ECHO, PING, IDENTIFY = "/peerd-test/echo/1", "/ipfs/ping/1.0.0", "/ipfs/id/1.0.0"
CHUNK_BYTES = 1 << 16
FLAGS = ["-natPortMap=false", "-b=false", "-quic=false", "-tls=false", "-relay=false", "-relayService=false", "-q"]
CALL_IDENTIFY, CALL_CONNECT, CALL_STREAM_OPEN, CALL_STREAM_HANDLER, CALL_LIST_PEERS = 0, 1, 2, 3, 5
FIELD_CONNECT, FIELD_STREAM_OPEN, FIELD_STREAM_HANDLER = 2, 3, 4
TIMEOUT_S = 20


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


# --- just enough protobuf ---------------------------------------------------------------------------------------
def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        value, at = read_varint(data, at)
        if key & 7 == 2:
            yield key >> 3, data[at : at + value]
            at += value
        else:
            yield key >> 3, value


def all_of(data: bytes, number: int) -> list[bytes]:
    return [value for key, value in fields(data) if key == number and isinstance(value, bytes)]


def first(data: bytes, number: int) -> bytes:
    return next(iter(all_of(data, number)), b"")


def unix_addr(path: str) -> bytes:
    """The multiaddr of a unix socket as Go writes it: with the leading slash inside the path."""
    return varint(400) + varint(len(path)) + path.encode()


# --- the daemon --------------------------------------------------------------------------------------------------
async def exactly(stream: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await stream.receive_some(count - len(data))
        if not part:
            raise EOFError("the stream ended early")
        data += part
    return data


async def receive_message(stream: trio.SocketStream) -> bytes:
    """The next message behind its varint length; reads not a byte more, because a stream may follow."""
    head = b""
    while not head or head[-1] > 127:
        head += await exactly(stream, 1)
    return await exactly(stream, read_varint(head, 0)[0])


class Daemon:
    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.control = f"{folder}/control"
        self.id = ""

    async def call(self, kind: int, body: bytes = b"") -> tuple[trio.SocketStream, bytes]:
        """One request; the connection it was made on, and the answer."""
        stream = await trio.open_unix_socket(self.control)
        request = field(1, kind) + body
        await stream.send_all(varint(len(request)) + request)
        answer = await receive_message(stream)
        if error := first(answer, 2):
            await stream.aclose()
            raise OSError(first(error, 1).decode(errors="replace"))
        return stream, answer

    async def ask(self, kind: int, body: bytes = b"") -> bytes:
        stream, answer = await self.call(kind, body)
        await stream.aclose()
        return answer

    async def ask_first(self, kind: int) -> bytes:
        """The same, from a daemon that is only just starting."""
        while True:
            try:
                return await self.ask(kind)
            except (FileNotFoundError, ConnectionRefusedError):
                await trio.sleep(0.01)  # it tells nobody when it is ready

    async def open(self, peer: str, protocol: str) -> trio.SocketStream:
        request = field(1, base58.b58decode(peer)) + field(2, protocol) + field(3, TIMEOUT_S)
        stream, _ = await self.call(CALL_STREAM_OPEN, field(FIELD_STREAM_OPEN, request))
        return stream

    async def serve_echo(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        path = f"{self.folder}/echo"
        listener = trio.socket.socket(trio.socket.AF_UNIX)
        await listener.bind(path)
        listener.listen(64)
        request = field(1, unix_addr(path)) + field(2, ECHO) + field(3, 0)
        await self.ask(CALL_STREAM_HANDLER, field(FIELD_STREAM_HANDLER, request))
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                connection, _ = await listener.accept()
                nursery.start_soon(echo_back, trio.SocketStream(connection))

    # --- commands ------------------------------------------------------------------------------------------------
    async def dial(self, addr: str) -> dict[str, object]:
        transport, _, peer = addr.rpartition("/p2p/")
        request = field(1, base58.b58decode(peer)) + field(2, Multiaddr(transport).to_bytes()) + field(3, TIMEOUT_S)
        await self.ask(CALL_CONNECT, field(FIELD_CONNECT, request))
        return {"peer": peer}

    async def ping(self, addr: str) -> dict[str, object]:
        await self.dial(addr)
        async with await self.open(addr.rpartition("/p2p/")[2], PING) as stream:
            start, data = time.perf_counter(), secrets.token_bytes(32)
            await stream.send_all(data)
            if await exactly(stream, 32) != data:
                raise ValueError("the ping came back changed")
            return {"rtt_ms": 1000 * (time.perf_counter() - start)}

    async def about(self, peer: str) -> dict[str, object]:
        async with await self.open(peer, IDENTIFY) as stream:
            message = await receive_message(stream)
        return {
            "agent": first(message, 6).decode(),
            "protocols": sorted(name.decode() for name in all_of(message, 3)),
            "addrs": [str(Multiaddr(addr)) for addr in all_of(message, 2)],
            "observed": str(Multiaddr(first(message, 4))) if first(message, 4) else None,
        }

    async def echo(self, addr: str, bytes: int) -> dict[str, object]:
        start = time.perf_counter()
        await self.dial(addr)
        sent, received, back = hashlib.sha256(), hashlib.sha256(), 0
        async with await self.open(addr.rpartition("/p2p/")[2], ECHO) as stream, trio.open_nursery() as nursery:
            nursery.start_soon(send_random, stream, bytes, sent)
            while back < bytes:
                data = await exactly(stream, min(CHUNK_BYTES, bytes - back))
                received.update(data)
                back += len(data)
        seconds = time.perf_counter() - start
        return {"sent_sha256": sent.hexdigest(), "got_sha256": received.hexdigest(), "bytes": back, "seconds": seconds}

    async def peers(self) -> dict[str, object]:
        answer = await self.ask(CALL_LIST_PEERS)
        return {"peers": [base58.b58encode(first(info, 1)).decode() for info in all_of(answer, 6)]}

    async def obey(self, line: bytes) -> None:
        command = json.loads(line)
        number, name = command.pop("id"), command.pop("do")
        try:
            say(id=number, **await getattr(self, name)(**command))
        except Exception as error:  # the tests want to see whatever it was
            say(id=number, error=f"{type(error).__name__}: {error}")


async def echo_back(stream: trio.SocketStream) -> None:
    async with stream:
        await receive_message(stream)  # the opener of the stream, and its name
        with contextlib.suppress(trio.BrokenResourceError):  # the other side ended first
            async for data in stream:
                await stream.send_all(data)


async def send_random(stream: trio.SocketStream, count: int, digest: hashlib._Hash) -> None:
    for offset in range(0, count, CHUNK_BYTES):
        chunk = secrets.token_bytes(min(CHUNK_BYTES, count - offset))
        digest.update(chunk)
        await stream.send_all(chunk)


async def obey_stdin(daemon: Daemon, nursery: trio.Nursery) -> None:
    buffer = b""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stdin:
        while data := await stdin.receive_some():
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                nursery.start_soon(daemon.obey, line)


async def main(binary: str, *more: str) -> None:
    with tempfile.TemporaryDirectory(prefix="peerd-go-") as folder:
        daemon = Daemon(folder)
        flags = [f"-listen=/unix{daemon.control}", "-hostAddrs=/ip4/127.0.0.1/tcp/0", *FLAGS, *more]
        async with trio.open_nursery() as nursery:
            run = partial(trio.run_process, [binary, *flags], stdin=None, stdout=sys.stderr, check=False)
            await nursery.start(run)
            answer = first(await daemon.ask_first(CALL_IDENTIFY), 4)
            peer = base58.b58encode(first(answer, 1)).decode()
            await nursery.start(daemon.serve_echo)
            say(ready=peer, addrs=[f"{Multiaddr(addr)}/p2p/{peer}" for addr in all_of(answer, 2)])
            await obey_stdin(daemon, nursery)
            nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, *sys.argv[1:])
