"""Several links to one peer: new streams take the best, the others stand by and go, and nobody sees the peer leave."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock as Clock

from peerd.core.addr import ip_of
from peerd.wire.host.host import Host, PeerUp
from peerd.wire.link.link_stream import Stream
from peerd.wire.path_selection import PathKind
from tests.worlds.network.hosts import ask, echoing, join


async def test_new_streams_take_the_better_link_and_open_ones_end_where_they_are(autojump_clock: Clock) -> None:
    async with echoing("a", "b") as (hosts, a, b):
        with a.watch() as events:
            relayed, _ = await join(hosts, a, b, PathKind.RELAYED, latency_s=0.05)
            old = await a.open_stream(b.id, "/echo/1")
            await old.send(b"x")
            punched, _ = await join(hosts, a, b, PathKind.PUNCHED)
            new = await a.open_stream(b.id, "/echo/1")
            assert old.superseded
            assert (new.link, new.superseded) == (punched, False)
            await old.send(b"y")
            assert await old.receive_exactly(2) == b"xy"
            await trio.sleep(60)
            assert list(a.links) == [relayed, punched]  # a stream is open on it
            await old.aclose()
            await new.aclose()
            await trio.sleep(25)
            assert list(a.links) == [punched]
            assert len(b.links) == 1
            assert a.traffic().peers[b.id].way == "punched"
            assert await events.receive() == PeerUp(b.id)
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()


async def test_when_the_better_link_is_lost_the_other_carries_on(autojump_clock: Clock) -> None:
    async with echoing("a", "b") as (hosts, a, b):
        with a.watch() as events:
            relayed, _ = await join(hosts, a, b, PathKind.RELAYED)
            punched, _ = await join(hosts, a, b, PathKind.PUNCHED)
            assert relayed.superseded_at is not None
            punched.abort("the router forgot us")
            await trio.sleep(0.1)
            assert relayed.superseded_at is None
            assert await ask(a, b, b"still there") == b"still there"
            await trio.sleep(60)
            assert list(a.links) == [relayed]
            assert await events.receive() == PeerUp(b.id)
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()


async def test_a_direct_link_that_only_one_side_knows_to_be_dead_ends_soon_after_the_other_dials_again(
    autojump_clock: Clock,
) -> None:
    async with echoing("a", "b") as (hosts, a, b):
        given_up, dead = await join(hosts, a, b, PathKind.DIRECT)
        assert dead.local is not None
        ends = [hosts.net.node_at(str(ip_of(addr))) for addr in (dead.local, dead.remote)]
        hosts.net.block(*(end.name for end in ends if end is not None))
        given_up.abort("its router has forgotten it")
        await trio.sleep(5)
        assert b.links.best(a.id) is dead
        await join(hosts, a, b, PathKind.RELAYED)
        assert b.links.best(a.id) is dead
        await trio.sleep(6)
        assert [link.way for link in b.links] == [PathKind.RELAYED]


async def test_a_peer_that_dials_again_though_its_link_lives_keeps_it(autojump_clock: Clock) -> None:
    async with echoing("a", "b") as (hosts, a, b):
        _, direct = await join(hosts, a, b, PathKind.DIRECT)
        await trio.sleep(5)
        await join(hosts, a, b, PathKind.RELAYED)
        await trio.sleep(60)
        assert list(b.links) == [direct]


@pytest.mark.parametrize(
    "ways", [(PathKind.DIRECT, PathKind.PUNCHED, PathKind.RELAYED), (PathKind.RELAYED, PathKind.LOCAL, PathKind.DIRECT)]
)
async def test_however_links_come_the_best_one_stays(autojump_clock: Clock, ways: tuple[PathKind, ...]) -> None:
    async with echoing("a", "b") as (hosts, a, b):
        for number, way in enumerate(ways):
            one, other = (a, b) if number % 2 else (b, a)
            await join(hosts, one, other, way)
        await trio.sleep(60)
        for host in (a, b):
            (link,) = host.links
            assert link.way == min(ways)


async def test_links_dialed_from_both_ends_at_once_become_one_without_breaking_streams(autojump_clock: Clock) -> None:
    async with echoing("a", "b", latency_s=0.05) as (hosts, a, b):
        a.learn(b.id, [hosts.addr("b")])
        b.learn(a.id, [hosts.addr("a")])
        streams: list[Stream] = []

        async def use(one: Host, other: Host) -> None:
            stream = await one.open_stream(other.id, "/echo/1")
            await stream.send(b"1")
            assert await stream.receive_exactly(1) == b"1"
            streams.append(stream)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(use, a, b)
            nursery.start_soon(use, b, a)
        assert len(a.links) == len(b.links) == 2
        await trio.sleep(1)
        for one, other in ((a, b), (b, a)):
            best = one.links.best(other.id)
            assert best is not None
            assert best.initiator is (one.id.raw < other.id.raw)
        for stream in streams:
            await stream.send(b"2")
            assert await stream.receive_exactly(1) == b"2"
            await stream.aclose()
        await trio.sleep(60)
        assert len(a.links) == len(b.links) == 1
        assert await ask(a, b, b"x") == b"x"


async def test_a_relay_that_floods_a_peer_with_links_cannot_push_the_direct_one_out(autojump_clock: Clock) -> None:
    async with echoing("a", "b") as (hosts, a, b):
        direct, _ = await join(hosts, a, b, PathKind.DIRECT)
        for _ in range(6):
            await join(hosts, b, a, PathKind.RELAYED)
            await trio.sleep(0.1)
        assert a.links.best(b.id) is direct
        assert await ask(a, b, b"x") == b"x"
