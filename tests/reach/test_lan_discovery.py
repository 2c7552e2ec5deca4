"""Neighbours that find each other: what is believed of what the local network says, and how many are dialed."""

from __future__ import annotations

import importlib.util
import ipaddress
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from multiaddr import Multiaddr

from peerd.core.addr import parse_addr, tcp_addr, with_peer
from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import ADDRS_PER_PEER, LAN_DIALS, LAN_PEERS
from peerd.reach.lan_discovery import LanConfig, LanDiscovery
from peerd.reach.mdns import Mdns, NoDiscovery, addrs_in, text_of
from peerd.wire.host.host import Host
from tests.worlds.network.hosts import Hosts, keypair, running_hosts

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("zeroconf") is None, reason="the extra peerd[lan] is not installed"
)
CONFIG = LanConfig()
PEER = keypair("somebody").peer_id


class Air:
    """The multicast medium of one network: every host hears each announcement."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[bytes], None]] = []
        self.said: list[bytes] = []
        self.broken = False

    async def run(self, addrs: Sequence[Multiaddr], found: Callable[[bytes], None]) -> None:
        if self.broken:
            raise NoDiscovery("no such thing here")
        self.listeners.append(found)
        try:
            for text in self.said:
                found(text)
            self.say(text_of(addrs))
            await trio.sleep_forever()
        finally:
            self.listeners.remove(found)

    def say(self, text: bytes) -> None:
        self.said.append(text)
        for found in list(self.listeners):
            found(text)


class Met(list[tuple[PeerId, Multiaddr]]):
    def __call__(self, peer: PeerId, addr: Multiaddr) -> None:
        self.append((peer, addr))


async def start(hosts: Hosts, name: str, air: Air, nursery: trio.Nursery) -> tuple[Host, LanDiscovery, Met]:
    host, met = await hosts.start(name), Met()
    lan = LanDiscovery(host, air, met, CONFIG)
    await nursery.start(lan.run)
    return host, lan, met


async def test_neighbours_find_each_other(autojump_clock: trio.testing.MockClock) -> None:
    air = Air()
    async with running_hosts() as hosts, trio.open_nursery() as nursery:
        a, lan, met_by_a = await start(hosts, "a", air, nursery)
        b, _, met_by_b = await start(hosts, "b", air, nursery)
        await trio.sleep(5)
        assert a.connected() == [b.id]
        met = {*met_by_a, *met_by_b}  # whoever heard first dials, and it may be both
        assert met
        assert met <= {(a.id, hosts.addr("a")), (b.id, hosts.addr("b"))}
        assert lan.status() == {"found": 1, "connected": 1, "problem": None}
        nursery.cancel_scope.cancel()


async def test_changed_addresses_are_announced_anew(autojump_clock: trio.testing.MockClock) -> None:
    air, more = Air(), tcp_addr("10.1.2.3", 4001)
    async with running_hosts() as hosts, trio.open_nursery() as nursery:
        a, _, _ = await start(hosts, "a", air, nursery)
        await trio.sleep(5)
        a.whereabouts.announce("test", [more])
        await trio.sleep(5)
        assert set(addrs_in(air.said[-1])) == {*addrs_in(air.said[0]), with_peer(more, a.id)}
        assert len(air.said) == 2
        nursery.cancel_scope.cancel()


async def test_a_liar_has_us_dial_few_at_once_and_nobody_outside(autojump_clock: trio.testing.MockClock) -> None:
    air, dialed = Air(), list[tuple[float, str]]()
    async with running_hosts() as hosts, trio.open_nursery() as nursery:
        a, lan, _ = await start(hosts, "a", air, nursery)
        a.whereabouts.networks = lambda: (ipaddress.ip_network("10.0.0.0/8"),)  # type: ignore[method-assign]

        async def connect(peer: PeerId, addrs: Sequence[Multiaddr] = ()) -> None:
            dialed.extend((trio.current_time(), str(addr)) for addr in addrs)
            await trio.sleep(1)
            raise Unreachable("nobody there", peer)

        a.connect = connect  # type: ignore[method-assign, assignment]
        begin = trio.current_time()
        for number in range(500):
            peer = PeerId.from_public_key(number.to_bytes(32, "big"))
            hosts_said = [f"10.9.{number // 256}.{number % 256}", "9.9.9.9", "127.0.0.1", "192.168.1.1"]
            air.say(text_of([with_peer(tcp_addr(ip, 1), peer) for ip in hosts_said]))
        await trio.sleep(10.5)
        assert {addr.split("/")[2].split(".")[0] for _, addr in dialed} == {"10"}
        assert len(dialed) <= 11 * LAN_DIALS
        assert len([at for at, _ in dialed if at == begin]) == LAN_DIALS
        assert lan.status()["found"] == LAN_PEERS
        nursery.cancel_scope.cancel()


async def test_a_neighbour_that_cannot_be_reached_is_tried_ever_more_rarely(
    autojump_clock: trio.testing.MockClock,
) -> None:
    air, at = Air(), list[float]()
    async with running_hosts() as hosts, trio.open_nursery() as nursery:
        a, _, _ = await start(hosts, "a", air, nursery)

        async def connect(peer: PeerId, addrs: Sequence[Multiaddr] = ()) -> None:
            at.append(trio.current_time())
            raise Unreachable("nobody there", peer)

        a.connect = connect  # type: ignore[method-assign, assignment]
        for _ in range(3):
            air.say(text_of([with_peer(tcp_addr("10.0.0.9", 1), PEER)]))
        await trio.sleep(1000)
        pauses = [round(b - a) for a, b in itertools.pairwise(at)]
        assert pauses == sorted(pauses)
        assert pauses[0] == CONFIG.again_s
        assert len(at) < 8
        nursery.cancel_scope.cancel()


async def test_where_discovery_does_not_work_the_reason_is_shown(autojump_clock: trio.testing.MockClock) -> None:
    air = Air()
    air.broken = True
    async with running_hosts() as hosts, trio.open_nursery() as nursery:
        _, lan, _ = await start(hosts, "a", air, nursery)
        await trio.sleep(1)
        assert lan.status()["problem"] == "no such thing here"
        nursery.cancel_scope.cancel()


def test_a_text_survives_the_way_and_is_read_in_part_when_it_is_too_long() -> None:
    addrs = [with_peer(tcp_addr("192.168.1.5", port), PEER) for port in range(1, 40)]
    assert addrs_in(text_of(addrs[:5])) == addrs[:5]
    assert addrs_in(text_of(addrs)) == addrs[:ADDRS_PER_PEER]


def test_what_is_no_address_of_a_peer_is_left_out() -> None:
    good = with_peer(tcp_addr("192.168.1.5", 4001), PEER)
    bad = [b"dnsaddr=/ip4/1.2.3.4/tcp/1", b"dnsaddr=nonsense", b"dnsaddr=\xff\xfe", b"other=1", b"", b"dnsaddr="]
    bad.append(f"dnsaddr={parse_addr(f'/ip4/9.9.9.9/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}')}".encode())
    texts = b"".join(bytes([len(text)]) + text for text in bad)
    assert addrs_in(texts + text_of([good])) == [good]
    assert addrs_in(text_of([good])[:-1]) == []


@given(st.binary(max_size=300), st.binary(max_size=60))
def test_no_text_raises(raw: bytes, inner: bytes) -> None:
    text = b"dnsaddr=/ip4/" + inner
    for each in (raw, bytes([len(text)]) + text):
        assert len(addrs_in(each)) <= ADDRS_PER_PEER


@needs_library
@pytest.mark.socket
@pytest.mark.slow
async def test_two_peers_find_each_other_by_multicast_dns() -> None:
    addrs = [with_peer(tcp_addr("127.0.0.1", port), keypair(str(port)).peer_id) for port in (4001, 4002)]
    heard: list[list[Multiaddr]] = [[], []]
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:

            def hear(number: int) -> Callable[[bytes], None]:
                def found(text: bytes) -> None:
                    heard[number] += addrs_in(text)
                    if addrs[1] in heard[0] and addrs[0] in heard[1]:
                        nursery.cancel_scope.cancel()

                return found

            for number, addr in enumerate(addrs):
                finder = Mdns(random.Random(number), ["127.0.0.1"])
                nursery.start_soon(finder.run, [addr], hear(number))
    assert addrs[1] in heard[0]
    assert addrs[0] in heard[1]
