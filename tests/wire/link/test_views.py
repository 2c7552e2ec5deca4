"""Bytes looked at where they lie: the same bytes as by any other way of receiving, until the next receive."""

from __future__ import annotations

import hashlib
import random

import pytest
import trio

from peerd.core.addr import parse_addr
from peerd.core.keys import Keypair
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host
from peerd.wire.link.link_stream import Stream
from peerd.wire.tcp.tcp_transport import TcpTransport

TOTAL_BYTES = 24 << 20


async def take_any_way(stream: Stream, seed: int, left: int) -> bytes:
    """Receive `left` bytes by turns in each way, in awkward portions; their digest."""
    rng, digest = random.Random(seed), hashlib.sha256()
    while left:
        most = min(left, rng.choice((1, 1000, 65_507, 65_519, 100_000, 1 << 20)))
        way = rng.randrange(4)
        if way == 0:
            data: bytes | bytearray | memoryview = await stream.receive_some(most)
        elif way == 1:
            data = bytearray(min(most, 200_000))
            await stream.receive_into(data)
        else:
            data = await stream.receive_view(most)
        assert 0 < len(data) <= most
        digest.update(data)
        left -= len(data)
        if rng.random() < 0.1:
            await trio.lowlevel.checkpoint()
    return digest.digest()


@pytest.mark.slow
@pytest.mark.socket
async def test_views_hold_what_was_sent_while_buffers_are_used_again(seed: int) -> None:
    hosts = [Host(Keypair.from_seed(bytes([n]) * 32), RealClock(n), [TcpTransport()]) for n in (1, 2)]
    ours, theirs = hosts
    found: list[bytes] = []
    done = trio.Event()

    async def sink(stream: Stream) -> None:
        found.append(await take_any_way(stream, seed, TOTAL_BYTES))
        assert await stream.receive_view(10) == b""
        done.set()

    theirs.handle("/sink/1", sink)
    async with trio.open_nursery() as nursery:
        for host in hosts:
            await nursery.start(host.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        await ours.connect(theirs.id, theirs.addrs())
        stream = await ours.open_stream(theirs.id, "/sink/1")
        rng, digest, left = random.Random(seed + 1), hashlib.sha256(), TOTAL_BYTES
        while left:
            data = rng.randbytes(min(left, rng.choice((10, 70_000, 300_000, 1 << 20))))
            digest.update(data)
            left -= len(data)
            await stream.send(data)
        await stream.close_write()
        with trio.fail_after(30):
            await done.wait()
        nursery.cancel_scope.cancel()
    assert found == [digest.digest()]


@pytest.mark.slow
@pytest.mark.socket
async def test_a_view_that_is_kept_too_long_is_an_error_and_not_other_bytes() -> None:
    host = Host(Keypair.from_seed(bytes(32)), RealClock(1), [TcpTransport()])
    other = Host(Keypair.from_seed(bytes(31) + b"1"), RealClock(2), [TcpTransport()])

    async def give(stream: Stream) -> None:
        await stream.send(bytes(200_000))

    other.handle("/give/1", give)
    async with trio.open_nursery() as nursery:
        for each in (host, other):
            await nursery.start(each.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        await host.connect(other.id, other.addrs())
        stream = await host.open_stream(other.id, "/give/1")
        view = await stream.receive_view(1 << 20)
        await stream.receive_some(1)
        with pytest.raises(ValueError, match="released"):
            view[0]
        nursery.cancel_scope.cancel()
