"""A peer that moves bulk within limits, as a process of its own: for a host of the lab.

`bulk_peer.py <seed> <upload Mb/s> <download Mb/s> <own address> <protocol> [<address> ...]`: listens, says "ready",
then sends to each peer named, which answers with bulk of its own if the protocol is /bulk/1, and not if it is /sink/1.
Runs until it is killed.
"""

from __future__ import annotations

import contextlib
import functools
import sys

import trio

from peerd.core.addr import parse_addr
from peerd.core.errors import RemoteError
from peerd.core.keys import Keypair
from peerd.run.runfile import LimitsSection
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host
from peerd.wire.link.link_stream import Stream
from peerd.wire.tcp.rate_limit import LimitedLine

BULK, SINK = "/bulk/1", "/sink/1"


async def read(stream: Stream) -> None:
    with contextlib.suppress(RemoteError):
        while await stream.receive_some(1 << 18):
            pass


async def exchange(stream: Stream) -> None:
    """Send for ever, and read what comes."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, stream)
            while True:
                await stream.send(bytes(1 << 18))
    except* RemoteError:
        pass


async def main(seed: int, up_mbit: float, down_mbit: float, listen: str, protocol: str, *targets: str) -> None:
    tcp = LimitedLine(LimitsSection(upload_mbit=up_mbit, download_mbit=down_mbit)).tcp()
    host = Host(Keypair.from_seed(bytes([seed]) * 32), RealClock(seed), [tcp])
    host.handle(BULK, exchange)
    host.handle(SINK, read)
    async with trio.open_nursery() as nursery:
        await nursery.start(functools.partial(host.run, [parse_addr(listen)]))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        for target in targets:
            peer = await host.connect_addr(parse_addr(target))
            nursery.start_soon(exchange, await host.open_stream(peer, protocol))


if __name__ == "__main__":
    trio.run(main, int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), *sys.argv[4:])
