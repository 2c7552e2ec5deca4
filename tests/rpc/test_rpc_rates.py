"""Rates at which payloads arrive, measured over lines of known rates: real hosts on a simulated network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from peerd.codec.format.frame import TensorFrame
from peerd.rpc.rpc import Rpc
from peerd.wire.host.host import Host
from tests.worlds.machines.fakehost import FakeHost, TrioClock
from tests.worlds.machines.rpc_cases import BIG, FRAMES, Text, echo, fake_pair
from tests.worlds.machines.rpc_growing_cases import Making
from tests.worlds.network.hosts import running_hosts

Clock = trio.testing.MockClock
UP_BYTES_PER_S, DOWN_BYTES_PER_S = 20e6 / 8, 80e6 / 8


@asynccontextmanager
async def lines() -> AsyncIterator[tuple[Rpc, Rpc, Host, Host]]:
    """`a` on a line of 20 Mb/s up and 80 Mb/s down, `b` on a much faster one; 10 ms between them."""
    async with running_hosts() as hosts, trio.open_nursery() as nursery:
        a_host = await hosts.start("a", up_mbit_s=20.0, down_mbit_s=80.0, latency_s=0.005)
        b_host = await hosts.start("b", up_mbit_s=1000.0, down_mbit_s=1000.0, latency_s=0.005)
        a_host.learn(b_host.id, [hosts.addr("b")])
        a, b = Rpc(a_host, TrioClock()), Rpc(b_host, TrioClock())
        b.serve("t/1/echo", Text, echo, declared=FRAMES)
        for rpc in (a, b):
            await nursery.start(rpc.run)
        yield a, b, a_host, b_host
        nursery.cancel_scope.cancel()


async def ask(rpc: Rpc, peer: Host | FakeHost, *frames: TensorFrame) -> None:
    await rpc.call(peer.id, "t/1/echo", Text(""), Text, frames=frames, timeout_s=600)


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.slow
async def test_the_rate_of_a_line_is_seen_in_both_directions(at_once: int, autojump_clock: Clock) -> None:
    async with lines() as (a, b, a_host, b_host):
        assert b.arrival_rate(a_host.id) is None
        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for _ in range(at_once):
                    nursery.start_soon(ask, a, b_host, BIG)
        assert b.arrival_rate(a_host.id) == pytest.approx(UP_BYTES_PER_S, rel=0.1)
        assert a.arrival_rate(b_host.id) == pytest.approx(DOWN_BYTES_PER_S, rel=0.25)
        assert b.status()["arrival_bytes_per_s"] == {a_host.id.short: b.arrival_rate(a_host.id)}


async def test_small_payloads_say_nothing(autojump_clock: Clock) -> None:
    async with lines() as (a, b, a_host, b_host):
        for _ in range(5):
            await ask(a, b_host, TensorFrame("uint8", (100_000,), bytes(100_000)))
        assert b.arrival_rate(a_host.id) is None
        assert a.status()["arrival_bytes_per_s"] == {}


async def test_a_payload_that_is_made_slowly_is_seen_at_the_rate_of_its_maker(autojump_clock: Clock) -> None:
    async with fake_pair() as (pair, _, a_host, b_host):
        pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
        making = Making(1 << 20)

        async def make() -> None:
            for _ in range(16):
                making.grow(1 << 16)
                await trio.sleep(0.1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(make)
            await ask(pair.a, b_host, making.frame)
        assert pair.b.arrival_rate(a_host.id) == pytest.approx((1 << 16) / 0.1)
