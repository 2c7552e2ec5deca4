"""Connections and streams are shared out by place: whoever has many identities at one address keeps nobody out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from peerd.core.addr import tcp_addr
from peerd.core.errors import RemoteError, Unreachable
from peerd.wire.budget.book import BOUNDS, Bounds, Resource
from peerd.wire.host.host import Host, HostConfig
from peerd.wire.host.link_table import LinkLimits
from peerd.wire.link.link_stream import Stream
from tests.worlds.network.hosts import ask, echo, keypair
from tests.worlds.network.virtual import running_net
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.memory import MemoryTransport
from tests.worlds.simulation.simnet import SimNet

pytestmark = pytest.mark.usefixtures("autojump_clock")
ADDR = tcp_addr("81.0.0.1", 4001)


class Town:
    """A host, and machines with addresses of their choice, each with as many identities as it likes."""

    def __init__(self, net: SimNet, nursery: trio.Nursery) -> None:
        self.net, self._nursery = net, nursery
        self._ports: dict[str, int] = {}

    async def start(self, name: str, ip: str, config: HostConfig | None = None) -> Host:
        node = self.net.nodes.get(ip) or self.net.add_node(ip, ip=ip)
        self._ports[ip] = port = self._ports.get(ip, 4000) + 1
        host = Host(keypair(name), SimClock(1, name), [MemoryTransport(self.net, node)], config)
        await self._nursery.start(host.run, [tcp_addr(ip, port)])
        return host

    async def hold(self, name: str, ip: str, target: Host) -> Stream:
        """A peer that comes in and keeps a stream open."""
        host = await self.start(name, ip)
        host.learn(target.id, [ADDR])
        stream = await host.open_stream(target.id, "/echo/1")
        await stream.send(b"x")
        await stream.receive_exactly(1)
        return stream


@asynccontextmanager
async def town(links: LinkLimits | None = None) -> AsyncIterator[tuple[Town, Host]]:
    async with running_net() as net, trio.open_nursery() as nursery:
        here = Town(net, nursery)
        host = await here.start("host", "81.0.0.1", HostConfig(links=links or LinkLimits()))
        host.handle("/echo/1", echo)
        yield here, host
        host.book.check()
        nursery.cancel_scope.cancel()


async def works(stream: Stream) -> bool:
    try:
        await stream.send(b"y")
        return await stream.receive_exactly(1) == b"y"
    except RemoteError:
        return False


async def test_open_streams_of_one_address_keep_nobody_out() -> None:
    async with town(LinkLimits(total=16, inbound=12)) as (here, host):
        honest = await here.hold("honest", "81.3.0.1", host)
        crowd = [await here.hold(f"crowd {number}", "81.2.0.1", host) for number in range(11)]
        for number in range(5):
            guest = await here.hold(f"guest {number}", f"81.{4 + number}.0.1", host)
            assert await works(guest)
        assert await works(honest)
        assert [await works(stream) for stream in crowd].count(True) == 6


async def test_a_crowd_at_one_address_replaces_only_its_own() -> None:
    async with town(LinkLimits(total=16, inbound=6)) as (here, host):
        honest = [await here.hold(f"honest {number}", f"81.{3 + number}.0.1", host) for number in range(3)]
        for number in range(20):
            with suppress(Unreachable):
                await here.hold(f"crowd {number}", "81.2.0.1", host)
        assert all([await works(stream) for stream in honest])
        assert host.book.used(Resource.LINKS) == 6


async def test_a_crowd_of_addresses_in_one_region_keeps_nobody_out() -> None:
    async with town(LinkLimits(total=16, inbound=8)) as (here, host):
        for number in range(8):
            await here.hold(f"crowd {number}", f"81.2.0.{1 + number}", host)
        guest = await here.hold("guest", "81.3.0.1", host)
        assert await works(guest)


async def test_a_member_in_use_gives_way_to_no_stranger_and_strangers_give_way_to_it() -> None:
    async with town(LinkLimits(total=16, inbound=4)) as (here, host):
        members = {keypair(f"member {number}").peer_id.text for number in range(6)}
        host.book.members_by(members.__contains__)
        early = [await here.hold(f"member {number}", "81.2.0.1", host) for number in range(3)]
        stranger = await here.hold("stranger", "81.3.0.1", host)
        with pytest.raises(RemoteError):
            await here.hold("stranger 2", "81.4.0.1", host)
        late = await here.hold("member 3", "81.2.0.1", host)
        assert all([await works(stream) for stream in [*early, late]])
        assert not await works(stranger)


async def test_connections_that_we_dialed_end_for_nobody_who_comes_in() -> None:
    async with town(LinkLimits(total=4, inbound=4)) as (here, host):
        friends = [await here.start(f"friend {number}", "81.5.0.1") for number in range(3)]
        for number, friend in enumerate(friends):
            await host.connect_addr(tcp_addr("81.5.0.1", 4001 + number))
            assert friend.id in host.connected()
        await trio.sleep(60)
        for number in range(3):
            with suppress(RemoteError):
                await here.hold(f"stranger {number}", f"81.{6 + number}.0.1", host)
        assert {friend.id for friend in friends} <= set(host.connected())


async def test_streams_are_bounded_by_place_over_all_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Bounds(total=40, peer=8, place=10, region=20, reserved=10)
    monkeypatch.setitem(BOUNDS, Resource.STREAMS, few)  # type: ignore[arg-type]
    async with town() as (here, host):
        streams = []
        for number in range(5):
            peer = await here.start(f"crowd {number}", "81.2.0.1")
            peer.learn(host.id, [ADDR])
            await peer.connect(host.id)
            await trio.sleep(5)  # introductions are over
            for _ in range(4):
                streams.append(await peer.open_stream(host.id, "/echo/1"))
        assert [await works(stream) for stream in streams].count(True) == 10
        guest = await here.start("guest", "81.3.0.1")
        guest.learn(host.id, [ADDR])
        assert await ask(guest, host, b"in") == b"in"
        for stream in streams:
            await stream.aclose()
        await trio.sleep(5)
        assert host.book.used(Resource.STREAMS) == 0


async def test_streams_of_connections_that_end_are_given_back() -> None:
    async with town() as (here, host):
        stream = await here.hold("peer", "81.2.0.1", host)
        assert host.book.used(Resource.STREAMS) == 1
        stream.link.abort("gone")
        await trio.sleep(5)
        assert host.book.used(Resource.STREAMS) == 0
        assert host.book.used(Resource.LINKS) == 0


@pytest.mark.slow
async def test_one_address_has_a_quarter_of_the_places_and_a_private_one_half() -> None:
    async with town() as (here, host):
        for name, ip in (("crowd", "81.2.0.1"), ("lab", "10.0.0.1")):
            for number in range(200):
                peer = await here.start(f"{name} {number}", ip)
                peer.learn(host.id, [ADDR])
                with suppress(Unreachable):
                    await peer.connect(host.id)
            await trio.sleep(5)
        (places,) = [use for use in host.book.told() if use.means is Resource.LINKS]
        assert places.used == BOUNDS[Resource.LINKS].place + BOUNDS[Resource.LINKS].region
        assert places.place == ("10.0.0.1", BOUNDS[Resource.LINKS].region)
