"""Our host and real go-libp2p, js-libp2p and py-libp2p peers understand each other, whoever dials.

Everything runs on loopback. Where a test waits for what a foreign process does by itself it looks every 10 ms, with a
deadline; everything else is awaited.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import trio

from peerd.core.addr import parse_addr, split_peer, with_peer
from peerd.core.errors import Refused, Unreachable
from peerd.core.ids import PeerId
from peerd.core.keys import Keypair
from peerd.wire.clock import RealClock
from peerd.wire.host import host as host_module
from peerd.wire.host import identify
from peerd.wire.host.host import Host, HostConfig, PeerDown
from peerd.wire.host.identify import PeerInfo
from peerd.wire.link.config import LinkConfig
from peerd.wire.link.link_stream import Stream
from peerd.wire.link.upgrade import UpgradedLink
from peerd.wire.tcp.tcp_transport import TcpTransport
from peerd.wire.yamux import frames as yamux
from tests.worlds.processes.foreign import NAMES, CommandFailed, ForeignPeer, foreign_peer

pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.socket]

ECHO = "/peerd-test/echo/1"
BULK_BYTES = 64 << 20
AGENTS = {"go": "p2pd/", "js": "js-libp2p/", "py": "py-libp2p/"}
HALF_CLOSING = ("js", "py")  # p2pd resets a stream whose other direction has ended

each_peer = pytest.mark.parametrize("name", NAMES)


async def serve_echo(stream: Stream) -> None:
    while data := await stream.receive_some(1 << 18):
        await stream.send(data)


@contextlib.asynccontextmanager
async def our_host() -> AsyncIterator[Host]:
    clock = RealClock()
    config = HostConfig(link=LinkConfig(linger_s=0.2))  # js does not close after our goodbye; that is a second a test
    host = Host(Keypair.generate(clock.secure_bytes), clock, [TcpTransport()], config)
    host.handle(ECHO, serve_echo)
    async with trio.open_nursery() as nursery:
        await nursery.start(host.run, [parse_addr("/ip4/127.0.0.1/tcp/0")])
        yield host
        nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def both(name: str) -> AsyncIterator[tuple[Host, ForeignPeer]]:
    async with foreign_peer(name) as foreign, our_host() as host:
        yield host, foreign


def id_of(foreign: ForeignPeer) -> PeerId:
    return PeerId.parse(foreign.id)


def bare(addr: str) -> str:
    return str(split_peer(parse_addr(addr))[0])


async def until(what: Callable[[], Awaitable[object]], timeout_s: float = 60) -> None:
    with trio.fail_after(timeout_s):
        while not await what():  # noqa: ASYNC110 (a foreign process sends no events)
            await trio.sleep(0.01)


async def their_info(host: Host, foreign: ForeignPeer) -> PeerInfo:
    """The foreign peer's identify information, once it has arrived."""

    async def there() -> bool:
        return host.info(id_of(foreign)) is not None

    await until(there)
    info = host.info(id_of(foreign))
    assert info is not None
    return info


async def their_peers(foreign: ForeignPeer, once: int) -> list[str]:
    """To whom it is connected, as soon as these are so many."""
    found: list[str] = []

    async def so() -> bool:
        found[:] = (await foreign.ask("peers"))["peers"]
        return len(found) == once

    await until(so)
    return found


async def echoed(stream: Stream, size: int, *, half_close: bool = False, write_bytes: int = 1 << 20) -> bool:
    """Send `size` random bytes and read them back at the same time; whether they are the same."""
    rng, sent, received, back = random.Random(size), hashlib.sha256(), hashlib.sha256(), 0

    async def send() -> None:
        left = size
        while left:
            chunk = rng.randbytes(min(write_bytes, left))
            left -= len(chunk)
            await trio.to_thread.run_sync(sent.update, chunk)
            await stream.send(chunk)
        if half_close:
            await stream.close_write()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        while (back < size or half_close) and (data := await stream.receive_some(1 << 18)):
            back += len(data)
            await trio.to_thread.run_sync(received.update, data)
    await stream.aclose()
    return back == size and sent.digest() == received.digest()


async def they_echo(foreign: ForeignPeer, host: Host, size: int, *, half_close: bool = False) -> bool:
    """The foreign peer sends `size` bytes to us and reads them back; whether it found them the same."""
    extra = {"half_close": True} if half_close else {}
    answer = await foreign.ask("echo", addr=str(host.addrs()[0]), bytes=size, **extra)
    return answer["bytes"] == size and answer["sent_sha256"] == answer["got_sha256"]


# --- the harness itself ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("first", "second"), [("go", "js"), ("js", "py"), ("py", "go")])
async def test_foreign_peers_understand_each_other_in_this_harness(first: str, second: str) -> None:
    async with foreign_peer(first, own=True) as one, foreign_peer(second, own=True) as two:
        assert (await one.ask("dial", addr=two.addr))["peer"] == two.id
        await one.ask("ping", addr=two.addr)
        answer = await one.ask("echo", addr=two.addr, bytes=1 << 20)
        assert answer["bytes"] == 1 << 20
        assert answer["sent_sha256"] == answer["got_sha256"]
        assert (await one.ask("about", peer=two.id))["agent"].startswith(AGENTS[second])


async def test_what_goes_wrong_beside_a_foreign_peer_is_not_swallowed() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with foreign_peer("go"):
            raise KeyError("seen")
    assert caught.group_contains(KeyError, match="seen")


# --- who is who ----------------------------------------------------------------------------------------------------
async def check_what_both_know(host: Host, foreign: ForeignPeer) -> None:
    info = await their_info(host, foreign)
    assert info.agent.startswith(AGENTS[foreign.name])
    assert {ECHO, identify.PING, identify.IDENTIFY} <= set(info.protocols)
    assert bare(foreign.addr) in [bare(str(addr)) for addr in info.addrs]
    assert str(info.observed).startswith("/ip4/127.0.0.1/tcp/")
    assert bare(foreign.addr) in [bare(str(addr)) for addr in host.known_addrs(id_of(foreign))]

    about_us = await foreign.ask("about", peer=str(host.id))
    assert about_us["agent"] == host.config.agent
    assert {ECHO, identify.PING, identify.IDENTIFY, identify.IDENTIFY_PUSH} <= set(about_us["protocols"])
    assert [bare(addr) for addr in about_us["addrs"]] == [bare(str(addr)) for addr in host.addrs()]
    (link,) = host.links
    assert bare(about_us["observed"]) == str(link.remote)
    assert (await foreign.ask("peers"))["peers"] == [str(host.id)]


@each_peer
async def test_identify_and_ping_are_right_both_ways_when_we_dial(name: str) -> None:
    async with both(name) as (host, foreign):
        assert await host.connect_addr(parse_addr(foreign.addr)) == id_of(foreign)
        await check_what_both_know(host, foreign)
        assert 0 < await host.ping(id_of(foreign)) < 5
        assert (await foreign.ask("ping", addr=str(host.addrs()[0])))["rtt_ms"] < 5000
        assert len(host.links) == 1  # their ping took the connection that was there


@each_peer
async def test_identify_and_ping_are_right_both_ways_when_they_dial(name: str) -> None:
    async with both(name) as (host, foreign):
        assert (await foreign.ask("dial", addr=str(host.addrs()[0])))["peer"] == str(host.id)
        await check_what_both_know(host, foreign)
        assert 0 < await host.ping(id_of(foreign)) < 5
        assert (await foreign.ask("ping", addr=str(host.addrs()[0])))["rtt_ms"] < 5000
        assert len(host.links) == 1


@each_peer
async def test_the_muxer_is_chosen_in_the_hand_shake_where_the_peer_offers_that(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str | None] = []
    real = host_module.upgrade

    async def upgrade(*args: object, **named: object) -> UpgradedLink:
        secured = await real(*args, **named)  # type: ignore[arg-type]
        chosen.append(secured.session.muxer)
        return secured

    monkeypatch.setattr(host_module, "upgrade", upgrade)
    async with both(name) as (host, foreign):
        await host.connect_addr(parse_addr(foreign.addr))
        await host.ping(id_of(foreign))
    async with both(name) as (host, foreign):
        await foreign.ask("dial", addr=str(host.addrs()[0]))
        await host.ping(id_of(foreign))
    assert chosen == [None if name == "py" else yamux.PROTOCOL] * 2


@each_peer
async def test_a_peer_with_another_identity_than_expected_is_refused_both_ways(name: str) -> None:
    other = Keypair.from_seed(bytes(32)).peer_id
    async with both(name) as (host, foreign):
        with pytest.raises(Unreachable) as caught:
            await host.connect_addr(with_peer(parse_addr(foreign.addr), other))
        assert str(other) in str(caught.value)
        assert foreign.id in str(caught.value)
        with pytest.raises(CommandFailed):
            await foreign.ask("dial", addr=f"{bare(str(host.addrs()[0]))}/p2p/{other}")
        assert not host.connected()
        await host.connect_addr(parse_addr(foreign.addr))  # nobody holds a grudge


# --- bulk ------------------------------------------------------------------------------------------------------------
@each_peer
@pytest.mark.timeout(600)
async def test_64_mb_come_back_unchanged_from_both_sides_when_we_dial(name: str) -> None:
    async with both(name) as (host, foreign):
        await host.connect_addr(parse_addr(foreign.addr))
        assert await echoed(await host.open_stream(id_of(foreign), ECHO), BULK_BYTES)
        assert await they_echo(foreign, host, BULK_BYTES)
        assert len(host.links) == 1


@each_peer
@pytest.mark.timeout(600)
async def test_64_mb_come_back_unchanged_when_they_dial(name: str) -> None:
    async with both(name) as (host, foreign):
        assert await they_echo(foreign, host, BULK_BYTES)
        assert await echoed(await host.open_stream(id_of(foreign), ECHO), BULK_BYTES // 8)
        assert len(host.links) == 1


@pytest.mark.parametrize("name", HALF_CLOSING)
async def test_a_direction_may_end_before_the_other_one(name: str) -> None:
    async with both(name) as (host, foreign):
        await host.connect_addr(parse_addr(foreign.addr))
        assert await echoed(await host.open_stream(id_of(foreign), ECHO), 3 << 20, half_close=True)
        assert await they_echo(foreign, host, 3 << 20, half_close=True)


@each_peer
async def test_writes_of_awkward_sizes_come_back_unchanged(name: str) -> None:
    async with both(name) as (host, foreign):
        await host.connect_addr(parse_addr(foreign.addr))
        for write_bytes in (1, 11, 12, 65507, 65519, 65520, 262144, 262145):
            size = min(3 * write_bytes + 1, 300_000)
            assert await echoed(await host.open_stream(id_of(foreign), ECHO), size, write_bytes=write_bytes)


@each_peer
async def test_forty_streams_at_once_are_kept_apart(name: str) -> None:
    async with both(name) as (host, foreign):
        await host.connect_addr(parse_addr(foreign.addr))
        await host.ping(id_of(foreign))  # js takes but ten streams before its own side of a new connection stands
        right: list[bool] = []

        async def one(size: int) -> None:
            right.append(await echoed(await host.open_stream(id_of(foreign), ECHO), size))

        async with trio.open_nursery() as nursery:
            for number in range(40):
                nursery.start_soon(one, 100_000 + number)
        assert right == [True] * 40


@each_peer
async def test_a_reader_that_pauses_slows_the_writer_and_loses_nothing(name: str) -> None:
    async with both(name) as (host, foreign):
        arrived = trio.Event()
        go_on = trio.Event()

        async def slow(stream: Stream) -> None:
            data = await stream.receive_some(1 << 16)
            arrived.set()
            await go_on.wait()
            await stream.send(data)
            await serve_echo(stream)

        host.handle(ECHO, slow)
        right: list[bool] = []

        async def ask() -> None:
            right.append(await they_echo(foreign, host, 4 << 20))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await arrived.wait()
            assert 0 < await host.ping(id_of(foreign)) < 5  # the connection is not blocked by one full stream
            go_on.set()
        assert right == [True]


@each_peer
async def test_many_streams_at_the_first_moment_are_all_served(name: str) -> None:
    async with foreign_peer(name, own=True) as foreign, our_host() as host:
        right: list[bool] = []

        async def ask(size: int) -> None:
            right.append(await echoed(await host.open_stream(id_of(foreign), ECHO), size))

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:

                def at_once(peer: PeerId) -> None:
                    for number in range(24):  # js serves 32 at once of one protocol
                        nursery.start_soon(ask, 100 + number)

                host.when_moved(at_once)
                await host.connect_addr(parse_addr(foreign.addr))
        assert right == [True] * 24
        assert len(host.links) == 1


# --- what goes wrong -------------------------------------------------------------------------------------------------
@each_peer
async def test_a_protocol_that_one_side_does_not_speak_costs_the_stream_only(name: str) -> None:
    async with both(name) as (host, foreign):
        await host.connect_addr(parse_addr(foreign.addr))
        stream = await host.open_stream(id_of(foreign), "/nobody/speaks/this/1")
        with pytest.raises(Refused):
            await stream.receive_some(1)
        stream.reset()
        host.unhandle(ECHO)
        with pytest.raises(CommandFailed):
            await foreign.ask("echo", addr=str(host.addrs()[0]), bytes=1000, timeout_s=30)
        host.handle(ECHO, serve_echo)
        assert await echoed(await host.open_stream(id_of(foreign), ECHO), 1000)


@each_peer
async def test_a_killed_peer_is_noticed_at_once(name: str) -> None:
    async with foreign_peer(name, own=True) as foreign, our_host() as host:
        await host.connect_addr(parse_addr(foreign.addr))
        await host.ping(id_of(foreign))
        with host.watch() as events:
            foreign.process.kill()
            with trio.fail_after(2):
                event = await events.receive()
        assert isinstance(event, PeerDown)
        assert event.peer == id_of(foreign)


@each_peer
async def test_a_peer_notices_that_we_leave(name: str) -> None:
    async with foreign_peer(name) as foreign:
        async with our_host() as host:
            await host.connect_addr(parse_addr(foreign.addr))
            await foreign.ask("ping", addr=str(host.addrs()[0]))
            assert await their_peers(foreign, once=1) == [str(host.id)]
        assert await their_peers(foreign, once=0) == []


@each_peer
async def test_a_stream_that_we_reset_ends_on_their_side_and_nothing_else_does(name: str) -> None:
    async with both(name) as (host, foreign):

        async def refuse(stream: Stream) -> None:
            await stream.receive_some(1000)
            stream.reset()

        host.handle(ECHO, refuse)
        with pytest.raises(CommandFailed):
            await foreign.ask("echo", addr=str(host.addrs()[0]), bytes=100_000, timeout_s=30)
        host.handle(ECHO, serve_echo)
        assert await they_echo(foreign, host, 100_000)
        assert len(host.links) == 1
