"""Failover: a peer that falls silent on one path is looked for on others, and nobody sees it leave meanwhile."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock as Clock

from peerd.core.addr import ip_of
from peerd.core.errors import Unreachable
from peerd.wire.host.host import Host, PeerDown, PeerUp
from peerd.wire.link.link import Link
from peerd.wire.path_selection import PathKind
from tests.worlds.network.hosts import Hosts, ask, echoing, join

FOUND_S = 1.5  # a second of silence after the question, and a dial
LEFT_S = 1.0  # that the silent link has then
GIVEN_UP_S = 2.5  # that it has on a quick line where there is no other path


def cut(hosts: Hosts, link: Link) -> None:
    """Lose all that passes this link, without a word to either end."""
    assert link.local is not None
    ends = [hosts.net.node_at(str(ip_of(addr))) for addr in (link.local, link.remote)]
    hosts.net.block(*(end.name for end in ends if end is not None))


async def used_and_cut(hosts: Hosts, a: Host, b: Host) -> Link:
    """A link from `a` on which a stream is open, and nothing was said for two seconds when it went dead."""
    link, _ = await join(hosts, a, b, PathKind.DIRECT)
    stream = await link.open("/echo/1")
    await stream.send(b"x")
    assert await stream.receive_exactly(1) == b"x"
    await trio.sleep(2)
    cut(hosts, link)
    return link


async def test_a_silent_peer_is_found_on_another_path_before_its_link_is_given_up(autojump_clock: Clock) -> None:
    async with echoing("a", "b", latency_s=0.01) as (hosts, a, b):
        with a.watch() as events:
            dead = await used_and_cut(hosts, a, b)
            (stream,) = dead.streams
            dead.doubt()
            await trio.sleep(FOUND_S)
            assert dead.usable
            assert dead.superseded_at is not None
            assert await ask(a, b, b"over another path") == b"over another path"
            with trio.fail_after(LEFT_S), pytest.raises(Unreachable):
                await stream.receive_some(1)
            await trio.sleep(60)
            assert dead not in a.links
            assert await events.receive() == PeerUp(b.id)
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()


async def test_a_path_that_stands_by_is_taken_without_a_dial(autojump_clock: Clock) -> None:
    async with echoing("a", "b", latency_s=0.01) as (hosts, a, b):
        relayed, _ = await join(hosts, a, b, PathKind.RELAYED)
        dead = await used_and_cut(hosts, a, b)
        assert a.links.best(b.id) is dead
        dead.doubt()
        await trio.sleep(FOUND_S)
        assert a.links.best(b.id) is relayed
        await trio.sleep(LEFT_S)
        assert list(a.links) == [relayed]


async def test_without_another_path_a_silent_link_keeps_its_time(autojump_clock: Clock) -> None:
    async with echoing("a", "b", latency_s=0.01) as (hosts, a, b):
        with a.watch() as events:
            dead = await used_and_cut(hosts, a, b)
            hosts.net.block("a", "b")
            dead.doubt()
            await trio.sleep(GIVEN_UP_S - 0.1)
            assert a.links.best(b.id) is dead
            assert await events.receive() == PeerUp(b.id)
            await trio.sleep(0.2)
            assert isinstance(events.receive_nowait(), PeerDown)


async def test_a_link_that_is_heard_again_is_used_again(autojump_clock: Clock) -> None:
    async with echoing("a", "b", latency_s=0.01) as (hosts, a, b):
        relayed, _ = await join(hosts, a, b, PathKind.RELAYED)
        direct = await used_and_cut(hosts, a, b)
        direct.doubt()
        await trio.sleep(1.1)
        assert a.links.best(b.id) is relayed
        hosts.net.heal()  # before the silent link has used up its last second
        (stream,) = direct.streams
        await stream.send(b"y")
        assert await stream.receive_exactly(1) == b"y"
        await trio.sleep(60)
        assert list(a.links) == [direct]


async def test_a_peer_that_answers_late_is_not_looked_for(autojump_clock: Clock) -> None:
    async with echoing("a", "b", latency_s=0.01) as (hosts, a, b):
        link = await used_and_cut(hosts, a, b)
        link.doubt()
        await trio.sleep(0.3)
        hosts.net.heal()
        await trio.sleep(60)
        assert list(a.links) == [link]


async def test_a_peer_that_is_asked_again_has_its_moment_again(autojump_clock: Clock) -> None:
    """The first question was answered at once; the second one just before anybody looked what became of the first."""
    async with echoing("a", "b", latency_s=0.01) as (hosts, a, b):
        link, _ = await join(hosts, a, b, PathKind.DIRECT, latency_s=0.1)
        await trio.sleep(5)
        assert link.rtt_s == pytest.approx(0.4, abs=0.05)
        link.doubt()
        await trio.sleep(4 * 0.4 - 0.1)
        assert not link.silence.doubted
        link.doubt()
        assert link.silence.doubted
        await trio.sleep(60)
        assert list(a.links) == [link]


async def test_what_the_same_cut_took_is_found_at_the_same_time(autojump_clock: Clock) -> None:
    """Only the first is missed by anybody; of an idle link that lives nobody takes notice."""
    async with echoing("a", "b", "c", "d", latency_s=0.01) as (hosts, a, b, c, d):
        first, second = await used_and_cut(hosts, a, b), await used_and_cut(hosts, a, c)
        alive, _ = await join(hosts, a, d, PathKind.DIRECT)
        stream = await alive.open("/echo/1")
        await stream.send(b"x")
        await trio.sleep(1.5)
        first.doubt()
        await trio.sleep(2 * FOUND_S)
        for dead, host in ((first, b), (second, c)):
            assert a.links.best(host.id) not in (None, dead)
        await trio.sleep(LEFT_S)
        assert [dead.usable for dead in (first, second)] == [False, False]
        assert a.links.to(d.id) == [alive]


async def test_who_is_asked_for_nobody_is_not_given_up_sooner(autojump_clock: Clock) -> None:
    async with echoing("a", "b", "c", latency_s=0.01) as (hosts, a, b, c):
        first, second = await used_and_cut(hosts, a, b), await used_and_cut(hosts, a, c)
        hosts.net.block("a", "b")
        hosts.net.block("a", "c")
        first.doubt()
        await trio.sleep(2 * GIVEN_UP_S)
        assert (first.usable, second.usable) == (False, True)


async def test_a_search_that_finds_nothing_does_not_hold_up_who_dials_after_it(autojump_clock: Clock) -> None:
    async with echoing("a", "b", latency_s=0.01) as (hosts, a, b):
        dead = await used_and_cut(hosts, a, b)
        hosts.net.block("a", "b")
        dead.doubt()
        await trio.sleep(GIVEN_UP_S + 0.1)
        assert not dead.usable
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.connect, b.id)
            await trio.sleep(0.1)
            hosts.net.heal()
            with trio.fail_after(1.5):  # an old dial would repeat its first packet later than that
                while a.links.best(b.id) is None:  # noqa: ASYNC110 (virtual time)
                    await trio.sleep(0.01)
