"""Addresses known by hearsay: none leads to private services, and no peer is flooded with dials."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
from multiaddr import Multiaddr

from peerd.core.addr import parse_addr, tcp_addr, with_peer
from peerd.core.errors import Unreachable
from peerd.core.limits import HEARSAY_TARGET_PER_MINUTE
from peerd.wire.host.host import Host
from peerd.wire.host.identify import IDENTIFY, send_identify
from peerd.wire.identify_message import Identify
from peerd.wire.link.link_stream import Stream
from tests.worlds.network.hosts import keypair
from tests.worlds.network.virtual import running_net
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.memory import MemoryTransport
from tests.worlds.simulation.simnet import SimNet

pytestmark = pytest.mark.usefixtures("autojump_clock")
RELAY = keypair("relay").peer_id
BAD = [
    "/ip4/127.0.0.1/tcp/6379",
    "/ip4/127.8.8.8/tcp/6379",
    "/ip6/::1/tcp/6379",
    "/ip6/::ffff:127.0.0.1/tcp/6379",
    "/ip4/169.254.169.254/tcp/80",
    "/ip4/10.9.9.9/tcp/22",
    "/ip4/192.168.7.7/tcp/22",
    "/ip4/100.64.0.9/tcp/22",
    "/ip6/fd00::9/tcp/22",
    "/ip6/64:ff9b::7f00:1/tcp/6379",
    "/ip4/240.0.0.1/tcp/80",
    "/dns4/internal.example/tcp/80",
    f"/ip4/10.9.9.9/tcp/22/p2p/{RELAY}/p2p-circuit",
]


async def start(net: SimNet, nursery: trio.Nursery, name: str, ip: str) -> Host:
    host = Host(keypair(name), SimClock(1, name), [MemoryTransport(net, net.add_node(name, ip=ip))])
    await nursery.start(host.run, [tcp_addr(ip, 4001)])
    return host


def says(host: Host, addrs: list[Multiaddr]) -> None:
    """Let `host` name these in its introductions."""

    async def describe(stream: Stream) -> None:
        await send_identify(stream, Identify(peer=host.id, listen_addrs=tuple(addr.to_bytes() for addr in addrs)))

    host.handle(IDENTIFY, describe)


def dialed(net: SimNet, name: str) -> list[str]:
    return [event.detail for event in net.trace.newest() if event.node == name and event.kind == "dial"]


async def told_and_left(host: Host, mallory: Host) -> None:
    """Mallory comes in, introduces itself, and goes; then somebody asks for it."""
    await mallory.connect_addr(with_peer(host.listen_addrs()[0], host.id))
    assert await host.introduction(mallory.id, 5) is not None
    for link in host.links:
        if link.peer == mallory.id:
            link.abort("gone")
    await trio.sleep(1)
    with suppress(Unreachable):
        await host.connect(mallory.id)


@pytest.mark.parametrize("bad", BAD)
async def test_what_a_peer_says_of_itself_leads_to_no_private_place(bad: str) -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        host = await start(net, nursery, "host", "81.0.0.1")
        mallory = await start(net, nursery, "mallory", "82.0.0.1")
        says(mallory, [parse_addr(bad), tcp_addr("83.0.0.1", 80)])
        await told_and_left(host, mallory)
        assert dialed(net, "host") == ["/ip4/83.0.0.1/tcp/80"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("home", ["127.0.0.1", "10.1.2.3", "100.64.1.1"])
async def test_who_is_in_a_private_network_may_name_it_and_outsiders_may_not_beside_it(home: str) -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        host = await start(net, nursery, "host", "81.0.0.1")
        neighbour = await start(net, nursery, "neighbour", home)
        mallory = await start(net, nursery, "mallory", "82.0.0.1")
        near, far = tcp_addr(home, 4005), tcp_addr(home, 6379)
        says(neighbour, [near])
        says(mallory, [far])
        await neighbour.connect_addr(with_peer(host.listen_addrs()[0], host.id))
        await host.introduction(neighbour.id, 5)
        await told_and_left(host, mallory)
        assert near in host.known_addrs(neighbour.id)
        assert host.known_addrs(mallory.id) == []
        assert dialed(net, "host") == []
        host.learn(keypair("third").peer_id, [near, far])  # somebody said so, who may be mallory
        assert host.known_addrs(keypair("third").peer_id) == []
        nursery.cancel_scope.cancel()


async def test_our_own_configuration_leads_anywhere() -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        host = await start(net, nursery, "host", "81.0.0.1")
        mallory = await start(net, nursery, "mallory", "82.0.0.1")
        await told_and_left(host, mallory)
        friend = await start(net, nursery, "friend", "10.9.9.9")
        assert await host.connect_addr(with_peer(friend.listen_addrs()[0], friend.id)) == friend.id
        with suppress(Unreachable):
            await host.connect_addr(parse_addr(f"/ip4/127.0.0.1/tcp/4001/p2p/{RELAY}"))
        assert "/ip4/127.0.0.1/tcp/4001" in dialed(net, "host")
        nursery.cancel_scope.cancel()


async def test_nobody_is_dialed_often_because_many_identities_say_so() -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        host = await start(net, nursery, "host", "81.0.0.1")
        mallory = await start(net, nursery, "mallory", "82.0.0.1")
        await told_and_left(host, mallory)
        before = len(dialed(net, "host"))
        victim = [tcp_addr("83.0.0.1", port) for port in range(80, 90)]
        begin = trio.current_time()

        async def look(number: int) -> None:
            peer = keypair(f"made up {number}").peer_id
            host.learn(peer, victim)
            with trio.move_on_after(20), suppress(Unreachable):
                await host.connect(peer)

        async with trio.open_nursery() as lookers:
            for number in range(40):
                lookers.start_soon(look, number)
        assert trio.current_time() - begin < 60
        assert len(dialed(net, "host")) - before == HEARSAY_TARGET_PER_MINUTE
        real = await start(net, nursery, "real", "84.0.0.1")
        host.learn(real.id, real.listen_addrs())
        await host.connect(real.id)
        host.book.check()
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_peers_that_answer_cost_nothing_however_many_share_an_address() -> None:
    async with running_net() as net, trio.open_nursery() as nursery:
        host = await start(net, nursery, "host", "81.0.0.1")
        node = net.add_node("flat", ip="85.0.0.1")
        for number in range(2 * HEARSAY_TARGET_PER_MINUTE):
            mate = Host(keypair(f"mate {number}"), SimClock(1, f"m{number}"), [MemoryTransport(net, node)])
            await nursery.start(mate.run, [tcp_addr("85.0.0.1", 5000 + number)])
            host.learn(mate.id, mate.listen_addrs())
            await host.connect(mate.id)
        assert len(host.connected()) == 2 * HEARSAY_TARGET_PER_MINUTE
        nursery.cancel_scope.cancel()
