"""A few things that only real sockets show. Everything else about hosts runs on the simulated network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from peerd.core.addr import parse_addr
from peerd.core.errors import ConfigError, Unreachable
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host, PeerDown
from peerd.wire.link import upgrade
from peerd.wire.tcp.tcp_transport import TcpTransport
from tests.worlds.network.hosts import ask, echo, keypair

pytestmark = pytest.mark.socket
LOOPBACK = parse_addr("/ip4/127.0.0.1/tcp/0")


@asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[Host, Host, trio.CancelScope]]:
    """`a` and `b` over TCP, connected; cancelling the scope makes `b` leave."""
    a, b = (Host(keypair(name), RealClock(1), [TcpTransport()]) for name in ("a", "b"))
    b.handle("/echo/1", echo)
    scope = trio.CancelScope()

    async def run_b(*, task_status: trio.TaskStatus[None]) -> None:
        with scope:
            await b.run([LOOPBACK], task_status=task_status)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            await nursery.start(a.run, [LOOPBACK])
            await nursery.start(run_b)
            assert await a.connect_addr(b.addrs()[0]) == b.id
            yield a, b, scope
            nursery.cancel_scope.cancel()


async def test_megabytes_come_back_unchanged_over_tcp() -> None:
    data = bytes(range(256)) * 16384
    async with two_hosts() as (a, b, _):
        assert await ask(a, b, data) == data
        assert await ask(a, b, b"small") == b"small"
        assert a.traffic().bytes_out > len(data)


@pytest.mark.parametrize("having", [0, 1, 2])
async def test_hosts_with_and_without_aes_understand_each_other(having: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [True] * having + [False] * (2 - having)
    monkeypatch.setattr(upgrade, "has_aes", lambda: answers.pop())
    data = bytes(range(256)) * 4096
    async with two_hosts() as (a, b, _):
        assert answers == []
        assert await ask(a, b, data) == data


async def test_many_streams_at_once_over_tcp() -> None:
    async with two_hosts() as (a, b, _), trio.open_nursery() as nursery:

        async def one(number: int) -> None:
            data = number.to_bytes(4, "big") * (100 if number % 10 else 50_000)
            assert await ask(a, b, data) == data

        for number in range(200):
            nursery.start_soon(one, number)


async def test_leaving_is_noticed_at_once_over_tcp() -> None:
    async with two_hosts() as (a, b, leave):
        with a.watch() as events:
            begin = trio.current_time()
            leave.cancel()
            event = await events.receive()
            assert isinstance(event, PeerDown)
            assert event.reason == "the peer left"
            assert trio.current_time() - begin < 1
        with pytest.raises(Unreachable, match="refused"):
            await a.connect(b.id)


async def test_a_port_in_use_is_named() -> None:
    async with two_hosts() as (a, _, _leave):
        taken = str(a.addrs()[0]).partition("/p2p")[0]
        other = Host(keypair("c"), RealClock(1), [TcpTransport()])
        with pytest.raises(ConfigError, match=f"{taken}: address already in use"):
            await other.run([parse_addr(taken)])
