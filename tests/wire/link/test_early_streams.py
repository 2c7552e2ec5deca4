"""A peer of another program gets few streams until it uses one itself: js-yamux 3 ends a connection with more.

js-libp2p keeps the streams that arrive before its connection is set up, and gives the connection up at the eleventh.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from peerd.core.limits import STREAMS_EARLY
from peerd.wire.host.host import Host
from peerd.wire.link.upgrade import upgrade
from peerd.wire.noise.multistream import HEADER
from peerd.wire.yamux.frames import PROTOCOL as YAMUX
from tests.worlds.network.hostile import Hostile, enter, secrets
from tests.worlds.network.hosts import Hosts, running_hosts
from tests.worlds.network.virtual import addr_of, transport

THEIRS = secrets("js")
PEER = THEIRS.identity.peer_id
MANY = 40
Meets = Callable[[Hosts, Host, trio.Nursery], Awaitable[Hostile]]


class Opener:
    """Opens MANY streams to the peer at the moment when a link to it stands."""

    def __init__(self, host: Host, nursery: trio.Nursery) -> None:
        self.opened = 0
        self._host, self._nursery = host, nursery
        host.when_moved(self._at_once)

    def _at_once(self, _: object) -> None:
        for _ in range(MANY):
            self._nursery.start_soon(self._open)

    async def _open(self) -> None:
        await self._host.open_stream(PEER, "/echo/1")
        self.opened += 1


async def js_dials(hosts: Hosts, host: Host, nursery: trio.Nursery) -> Hostile:
    return await enter(transport(hosts.net, "js"), hosts.addr("host"), THEIRS)


async def js_is_dialed(hosts: Hosts, host: Host, nursery: trio.Nursery) -> Hostile:
    listener = await transport(hosts.net, "js").listen(addr_of(hosts.net, "js"))
    nursery.start_soon(host.connect, PEER, [addr_of(hosts.net, "js")])
    raw = await listener.accept()
    return Hostile(raw, await upgrade(raw, THEIRS.fresh(bytes(range(32))), initiator=False, muxers=(YAMUX,)))


@asynccontextmanager
async def met(meets: Meets) -> AsyncIterator[tuple[Opener, Hostile]]:
    async with running_hosts() as hosts, trio.open_nursery() as nursery:
        host = await hosts.start("host")
        opener = Opener(host, nursery)
        js = await meets(hosts, host, nursery)
        while await js.hear():
            await js.pump()  # each stream is acknowledged, and none is answered
        yield opener, js
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("meets", [js_dials, js_is_dialed])
async def test_a_peer_that_answered_nothing_yet_gets_few_streams(meets: Meets, autojump_clock: MockClock) -> None:
    async with met(meets) as (opener, js):
        assert js.mux.inbound == STREAMS_EARLY
        assert not js.ended
        first = js.mux.streams[min(js.mux.streams)]
        await js.send(first, HEADER)  # it serves streams
        while await js.hear():
            await js.pump()
        assert opener.opened == MANY
        assert js.mux.inbound == MANY + 1, "identify is one more"


@pytest.mark.parametrize("meets", [js_dials, js_is_dialed])
async def test_a_peer_that_opens_a_stream_itself_gets_all(meets: Meets, autojump_clock: MockClock) -> None:
    async with met(meets) as (opener, js):
        await js.open("/echo/1")
        while await js.hear():
            await js.pump()
        assert opener.opened == MANY
