"""Circuits with real foreign peers on loopback: their relay between two of ours, and ours with them behind it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
import trio
from multiaddr import Multiaddr

from peerd.core.addr import circuit_addr, parse_addr, with_peer
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.reach.relay.circuit_transport import Circuits
from peerd.reach.relay.relay import Relay
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host
from peerd.wire.path_selection import PathKind
from peerd.wire.tcp.tcp_transport import TcpTransport
from tests.worlds.network.hosts import ask, echo
from tests.worlds.processes.foreign import foreign_peer

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.socket]

ECHO = "/peerd-test/echo/1"
RELAY_FLAGS = ("-relay=true", "-relayService=true", "-forceReachabilityPublic")
BEHIND_FLAGS = ("-relay=true", "-autoRelay", "-relayDiscovery=false", "-dhtClient", "-forceReachabilityPrivate")


@dataclass
class Ours:
    """A host of ours with circuits."""

    host: Host
    circuits: Circuits
    relay: Relay

    @property
    def addr(self) -> str:
        return str(self.host.addrs()[0])

    def ways(self, peer: PeerId) -> list[PathKind]:
        return [link.way for link in self.host.links if link.peer == peer]


@contextlib.asynccontextmanager
async def ours() -> AsyncIterator[Ours]:
    clock = RealClock()
    keys = Keypair.generate(clock.secure_bytes)
    host = Host(keys, clock, [TcpTransport()])
    circuits, relay = Circuits(host, clock), Relay(host, clock, keys)
    host.add_transport(circuits)
    host.handle(ECHO, echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        await nursery.start(circuits.run)
        await nursery.start(relay.run)
        yield Ours(host, circuits, relay)
        nursery.cancel_scope.cancel()


async def until(what: Callable[[], Awaitable[object]], timeout_s: float = 60) -> None:
    with trio.fail_after(timeout_s):
        while not await what():  # noqa: ASYNC110 (a foreign process sends no events)
            await trio.sleep(0.05)


async def until_behind(relay: Ours) -> Multiaddr:
    """The way to whoever gets a reservation. p2pd tells nobody of one at a loopback address."""

    async def reserved() -> bool:
        return relay.relay.traffic().reservations == 1

    await until(reserved)
    return circuit_addr(parse_addr(relay.addr), relay.host.id)


async def test_p2pd_relays_between_two_of_ours() -> None:
    async with foreign_peer("go", *RELAY_FLAGS) as go, ours() as a, ours() as b:
        relay = await b.host.connect_addr(parse_addr(go.addr))
        held = await b.circuits.reserve(relay)
        assert held.limit is not None
        await a.host.connect(b.host.id, held.addrs)
        data = bytes(range(256)) * 150  # p2pd allows 4 GiB or 128 KiB, whichever of its two services comes first
        assert await ask(a.host, b.host, data, ECHO) == data
        assert (a.ways(b.host.id), b.ways(a.host.id)) == ([PathKind.RELAYED], [PathKind.RELAYED])
        again = await b.circuits.reserve(relay)
        assert again.expires_at > held.expires_at - 2  # in whole seconds


async def test_p2pd_behind_our_relay_is_reached_by_ours() -> None:
    async with ours() as relay, ours() as a:
        flags = (*BEHIND_FLAGS, f"-trustedRelays={relay.addr}")
        async with foreign_peer("go", *flags) as go:
            peer = PeerId.parse(go.id)
            await a.host.connect(peer, [await until_behind(relay)])
            stream = await a.host.open_stream(peer, ECHO)
            await stream.send(b"over our relay")
            assert await stream.receive_exactly(14) == b"over our relay"
            assert a.ways(peer) == [PathKind.RELAYED]
            assert relay.relay.traffic().circuits == 1


async def test_p2pd_dials_one_of_ours_over_our_relay() -> None:
    async with ours() as relay, ours() as b, foreign_peer("go", "-relay=true") as go:
        await b.host.connect_addr(parse_addr(relay.addr))
        (addr,) = (await b.circuits.reserve(relay.host.id)).addrs
        assert addr == circuit_addr(parse_addr(relay.addr), relay.host.id)
        await go.ask("dial", addr=str(with_peer(addr, b.host.id)))
        peer = PeerId.parse(go.id)

        async def told() -> bool:
            return b.host.info(peer) is not None

        await until(told)
        assert b.ways(peer) == [PathKind.RELAYED]
        assert await b.host.ping(peer) < 5


async def test_js_relays_between_two_of_ours() -> None:
    async with foreign_peer("js", "relay") as js, ours() as a, ours() as b:
        held = await b.circuits.reserve(await b.host.connect_addr(parse_addr(js.addr)))
        await a.host.connect(b.host.id, held.addrs)
        data = bytes(range(256)) * 150
        assert await ask(a.host, b.host, data, ECHO) == data
        assert a.ways(b.host.id) == [PathKind.RELAYED]


async def test_js_behind_our_relay_is_reached_by_ours() -> None:
    async with ours() as relay, ours() as a, foreign_peer("js", f"behind={relay.addr}") as js:
        peer = PeerId.parse(js.id)
        await a.host.connect(peer, [await until_behind(relay)])
        stream = await a.host.open_stream(peer, ECHO)
        await stream.send(b"over our relay")
        assert await stream.receive_exactly(14) == b"over our relay"
        assert a.ways(peer) == [PathKind.RELAYED]
        await stream.aclose()


async def test_js_dials_one_of_ours_over_our_relay_and_sends_megabytes() -> None:
    async with ours() as relay, ours() as b, foreign_peer("js", "circuits") as js:
        await b.host.connect_addr(parse_addr(relay.addr))
        (addr,) = (await b.circuits.reserve(relay.host.id)).addrs
        echoed = await js.ask("echo", addr=str(with_peer(addr, b.host.id)), bytes=4 << 20, half_close=True)
        assert echoed["sent_sha256"] == echoed["got_sha256"]
        assert b.ways(PeerId.parse(js.id)) == [PathKind.RELAYED]
        assert relay.relay.traffic().carried_bytes > 8 << 20
