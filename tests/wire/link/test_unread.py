"""Streams that are filled while nobody reads them: a link, and all links, hold so much and no more."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock as Clock

from peerd.wire.host.host import Host, HostConfig
from peerd.wire.link.link_stream import Stream
from peerd.wire.transport import Transport
from peerd.wire.yamux.frames import DATA, SYN
from tests.worlds.network.hostile import Hostile, enter, frame, hello, secrets
from tests.worlds.network.hosts import Hosts, ask, echo, running_hosts
from tests.worlds.network.virtual import transport

FILL = 200_000  # of one stream
LINK, ALL = 2 << 20, 5 << 20
CONFIG = HostConfig(unread_link_bytes=LINK, unread_host_bytes=ALL)


async def mute(stream: Stream) -> None:
    await stream.wait_gone()


async def fill(hosts: Hosts, network: Transport, who: str, streams: int) -> Hostile:
    hostile = await enter(network, hosts.addr("host"), secrets(who))
    body = hello("/mute/1") + bytes(FILL)
    for number in range(1, 2 * streams, 2):
        await hostile.say(frame(DATA, SYN, number, len(body), body))
    await trio.sleep(0.1)
    return hostile


def held_bytes(host: Host, who: str | None = None) -> int:
    peer = secrets(who).identity.peer_id if who else None
    links = [link for link in host.links if peer in (None, link.peer)]
    return sum(stream.mux.inbox_bytes for link in links for stream in link.streams)


async def test_one_link_holds_its_share_and_its_peer_is_named(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_hosts() as hosts:
        host, honest = await hosts.start("host", CONFIG), await hosts.start("honest")
        host.handle("/mute/1", mute)
        host.handle("/echo/1", echo)
        await honest.connect(host.id, [hosts.addr("host")])
        waiting = await honest.open_stream(host.id, "/mute/1")
        await waiting.send(bytes(FILL))
        await fill(hosts, transport(hosts.net, "x"), "x", 40)
        assert LINK // 2 < held_bytes(host, "x") <= LINK + (1 << 20)
        assert str(secrets("x").identity.peer_id) in caplog.text
        await waiting.send(b"as if nothing had happened")
        assert await ask(honest, host, b"still there?") == b"still there?"


async def test_all_links_hold_their_share_and_the_fullest_place_gives_way(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        host, honest = await hosts.start("host", CONFIG), await hosts.start("honest")
        host.handle("/mute/1", mute)
        await honest.connect(host.id, [hosts.addr("host")])
        waiting = [await honest.open_stream(host.id, "/mute/1") for _ in range(4)]
        for stream in waiting:
            await stream.send(bytes(FILL))
        network = transport(hosts.net, "x")
        for number in range(6):
            await fill(hosts, network, f"x{number}", 9)  # each keeps to its own share
        assert held_bytes(host) <= ALL + (1 << 20)
        assert host.unread.total_bytes <= ALL
        for stream in waiting:
            await stream.send(b"x")
        await trio.sleep(1)
        assert [held.mux.inbox_bytes for link in host.links if link.peer == honest.id for held in link.streams] == [
            FILL + 1
        ] * 4


async def test_what_links_held_is_free_when_they_end(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        host = await hosts.start("host", CONFIG)
        host.handle("/mute/1", mute)
        hostile = await fill(hosts, transport(hosts.net, "x"), "x", 8)
        assert host.unread.total_bytes > 1 << 20
        await hostile.raw.aclose()
        await trio.sleep(1)
        assert host.unread.total_bytes == 0


async def test_who_reads_may_receive_without_end(autojump_clock: Clock) -> None:
    taken = 0

    async def sink(stream: Stream) -> None:
        nonlocal taken
        while data := await stream.receive_some(1 << 18):
            taken += len(data)

    async with running_hosts() as hosts:
        host, honest = await hosts.start("host", CONFIG), await hosts.start("honest")
        host.handle("/sink/1", sink)
        await honest.connect(host.id, [hosts.addr("host")])
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                stream = await honest.open_stream(host.id, "/sink/1")
                nursery.start_soon(stream.send, bytes(1 << 20))
        await trio.sleep(1)
        assert taken == 30 << 20
