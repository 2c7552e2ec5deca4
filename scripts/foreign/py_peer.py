"""A py-libp2p peer under remote control: one JSON command a line on stdin, one JSON answer a line on stdout.

Commands are described in tests/worlds/processes/foreign.py. It ends when stdin ends, so it cannot outlive its parent.
It runs in a virtual environment of its own, never in peerd's. Only Noise is offered: by default
py-libp2p also accepts plaintext.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
import time
from collections.abc import AsyncIterator

import trio
from libp2p import create_yamux_muxer_option, new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as new_noise_key
from libp2p.host.ping import PingService
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.identify import parse_identify_response
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from multiaddr import Multiaddr

ECHO = "/peerd-test/echo/1"
CHUNK_BYTES = 1 << 16


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def parts_of(stream: INetStream) -> AsyncIterator[bytes]:
    """Data from the stream, until its end."""
    while True:
        try:
            data = await stream.read(CHUNK_BYTES)
        except StreamEOF:
            return
        if not data:
            return
        yield data


async def serve_echo(stream: INetStream) -> None:
    async for data in parts_of(stream):
        await stream.write(data)
    await stream.close()


class Peer:
    def __init__(self, host: IHost) -> None:
        self.host = host
        self.pings = PingService(host)

    async def dial(self, addr: str) -> dict[str, object]:
        info = info_from_p2p_addr(Multiaddr(addr))
        await self.host.connect(info)
        return {"peer": str(info.peer_id)}

    async def ping(self, addr: str) -> dict[str, object]:
        await self.dial(addr)
        rtts = await self.pings.ping(info_from_p2p_addr(Multiaddr(addr)).peer_id)
        return {"rtt_ms": rtts[0]}

    async def about(self, peer: str) -> dict[str, object]:
        stream = await self.host.new_stream(ID.from_string(peer), [IDENTIFY])
        message = parse_identify_response(b"".join([part async for part in parts_of(stream)]))
        await stream.close()
        return {
            "agent": message.agent_version,
            "protocols": sorted(message.protocols),
            "addrs": [str(Multiaddr(addr)) for addr in message.listen_addrs],
            "observed": str(Multiaddr(message.observed_addr)) if message.observed_addr else None,
        }

    async def echo(self, addr: str, bytes: int, half_close: bool = False) -> dict[str, object]:
        start = time.perf_counter()
        await self.dial(addr)
        stream = await self.host.new_stream(info_from_p2p_addr(Multiaddr(addr)).peer_id, [ECHO])
        sent, received, back = hashlib.sha256(), hashlib.sha256(), 0

        async def send() -> None:
            for offset in range(0, bytes, CHUNK_BYTES):
                chunk = secrets.token_bytes(min(CHUNK_BYTES, bytes - offset))
                sent.update(chunk)
                await stream.write(chunk)
            if half_close:
                await stream.close_write()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            async for data in parts_of(stream):
                received.update(data)
                back += len(data)
                if back == bytes and not half_close:
                    break
        await stream.close()
        if back != bytes:  # a stream that was reset reads like one that ended
            raise ValueError(f"{back} of {bytes} bytes came back")
        seconds = time.perf_counter() - start
        return {"sent_sha256": sent.hexdigest(), "got_sha256": received.hexdigest(), "bytes": back, "seconds": seconds}

    async def peers(self) -> dict[str, object]:
        return {"peers": [str(peer) for peer in self.host.get_connected_peers()]}

    async def obey(self, line: bytes) -> None:
        command = json.loads(line)
        number, name = command.pop("id"), command.pop("do")
        try:
            say(id=number, **await getattr(self, name)(**command))
        except Exception as error:  # the tests want to see whatever it was
            say(id=number, error=f"{type(error).__name__}: {error}")


async def main() -> None:
    keys = create_new_key_pair()
    security = {NOISE: NoiseTransport(keys, noise_privkey=new_noise_key().private_key)}
    host = new_host(key_pair=keys, sec_opt=security, muxer_opt=create_yamux_muxer_option())
    async with host.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]), trio.open_nursery() as nursery:
        host.set_stream_handler(ECHO, serve_echo)
        peer = Peer(host)
        say(ready=str(host.get_id()), addrs=[str(addr) for addr in host.get_addrs()])
        buffer = b""
        async with trio.lowlevel.FdStream(sys.stdin.fileno()) as stdin:
            while data := await stdin.receive_some():
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    nursery.start_soon(peer.obey, line)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
