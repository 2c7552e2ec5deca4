"""A pair of peers on fake hosts, for tests of calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from peerd.service.rpc.rpc import Rpc
from tests.worlds.machines.fakehost import FakeHost, FakeNet, TrioClock, fake_net
from tests.worlds.machines.rpc_cases import Pair


@asynccontextmanager
async def fake_pair() -> AsyncIterator[tuple[Pair, FakeNet, FakeHost, FakeHost]]:
    async with fake_net() as net:
        a_host, b_host = net.host("a"), net.host("b")
        a, b = Rpc(a_host, TrioClock()), Rpc(b_host, TrioClock())
        await net.nursery.start(a.run)
        await net.nursery.start(b.run)
        pair = Pair(a, b, a_host, b_host, b_host.crashes, lambda: net.cut(a_host.id, b_host.id))
        yield pair, net, a_host, b_host
