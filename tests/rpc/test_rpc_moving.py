"""Calls when a better link to a peer stands: the next ones travel on it, those under way end on the old one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock as Clock

from peerd.core.errors import TooSlow
from peerd.messages.encoding import Empty
from peerd.rpc.rpc import Rpc
from peerd.wire.host.host import Host
from peerd.wire.link.link import Link
from peerd.wire.path_selection import PathKind
from tests.kit.declared import ANY
from tests.worlds.machines.rpc_cases import BIG, FRAMES, Held, Pair, Text, ask, echo, repeat
from tests.worlds.network.hosts import Hosts, join, running_hosts
from tests.worlds.simulation.clock import SimClock


@asynccontextmanager
async def relayed_pair() -> AsyncIterator[tuple[Hosts, Pair, Host, Host, Link]]:
    """Two peers with a relayed link: its end at `a` is the last."""
    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        pair = Pair(Rpc(a, SimClock(1, "a")), Rpc(b, SimClock(1, "b")), a, b, [], lambda: None)
        relayed, _ = await join(hosts, a, b, PathKind.RELAYED, latency_s=0.1)
        await hosts.nursery.start(pair.a.run)
        await hosts.nursery.start(pair.b.run)
        pair.b.serve("t/1/echo", Text, echo, declared=FRAMES)
        pair.b.serve_stream("t/1/repeat", Text, repeat, declared=ANY)
        await trio.sleep(1)  # introductions
        yield hosts, pair, a, b, relayed


async def repeated(pair: Pair) -> None:
    async with pair.a.stream(pair.b_host.id, "t/1/repeat", Text("x"), timeout_s=60) as parts:
        parts.finish()
        assert await parts.receive(Text) is not None
        assert await parts.receive(Text) is None


async def test_calls_after_the_better_link_stands_travel_on_it(autojump_clock: Clock) -> None:
    async with relayed_pair() as (hosts, pair, a, b, relayed):
        held = Held()
        pair.b.serve("t/1/held", Text, held, declared=ANY)
        await ask(pair)
        await pair.a.call(b.id, "t/1/echo", Text("x"), Text, frames=(BIG,), timeout_s=60)  # leaves an idle lane
        await repeated(pair)  # and another
        async with trio.open_nursery() as nursery:

            async def under_way() -> None:
                await pair.a.call(b.id, "t/1/held", Text("x"), Empty, timeout_s=60)

            nursery.start_soon(under_way)
            await held.entered.wait()
            punched, _ = await join(hosts, a, b, PathKind.PUNCHED)
            await trio.sleep(1)
            sent = relayed.bytes_out
            began = trio.current_time()
            await ask(pair)
            await pair.a.call(b.id, "t/1/echo", Text("x"), Text, frames=(BIG,), timeout_s=60)
            await repeated(pair)
            assert trio.current_time() - began < 0.05  # nothing of them took the slow way
            assert relayed.bytes_out == sent
            held.let_go.set()
        await trio.sleep(30)
        assert list(a.links) == [punched]
        assert pair.a.status()["channels"] == 3
        await ask(pair)


async def test_a_streaming_call_goes_on_where_it_began_and_then_the_old_link_ends(autojump_clock: Clock) -> None:
    async with relayed_pair() as (hosts, pair, a, b, relayed):
        async with pair.a.stream(b.id, "t/1/repeat", Text("first"), timeout_s=200) as parts:
            assert (await parts.receive(Text)) is not None
            punched, _ = await join(hosts, a, b, PathKind.PUNCHED)
            await trio.sleep(60)
            assert relayed in list(a.links)
            await parts.send(Text("second"))
            part = await parts.receive(Text)
            assert part is not None
            assert part.body.text == "second"
            parts.finish()
            assert await parts.receive(Text) is None
        await trio.sleep(30)
        assert list(a.links) == [punched]


async def test_a_call_left_on_the_old_link_still_meets_its_deadline(autojump_clock: Clock) -> None:
    async with relayed_pair() as (hosts, pair, a, b, _):
        held = Held()
        pair.b.serve("t/1/held", Text, held, declared=ANY)
        await ask(pair)
        async with trio.open_nursery() as nursery:

            async def late() -> None:
                began = trio.current_time()
                with pytest.raises(TooSlow):
                    await pair.a.call(b.id, "t/1/held", Text("x"), Empty, timeout_s=20)
                assert trio.current_time() - began == pytest.approx(20, abs=0.1)

            nursery.start_soon(late)
            await held.entered.wait()
            punched, _ = await join(hosts, a, b, PathKind.PUNCHED)
            await ask(pair)
        await trio.sleep(30)
        assert list(a.links) == [punched]
        assert pair.a.status()["waiting"] == 0


async def test_when_the_better_link_is_lost_calls_return_to_the_other(autojump_clock: Clock) -> None:
    async with relayed_pair() as (hosts, pair, a, b, relayed):
        await ask(pair)
        punched, _ = await join(hosts, a, b, PathKind.PUNCHED)
        await ask(pair)
        punched.abort("the router forgot us")
        await trio.sleep(0.1)
        await ask(pair)
        assert list(a.links) == [relayed]
