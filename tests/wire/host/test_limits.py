"""Limits on a host's means for strangers and greedy peers: use is always bounded, and others still get in."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from peerd.core import limits
from peerd.core.errors import Unreachable
from peerd.wire.host.host import Host, HostConfig, PeerDown, PeerUp
from peerd.wire.host.link_table import LinkLimits
from peerd.wire.link.config import LinkConfig
from peerd.wire.link.link_stream import Stream
from peerd.wire.link.upgrade import UpgradedLink, upgrade
from peerd.wire.noise import noise
from peerd.wire.noise.multistream import HEADER, encode_line
from peerd.wire.transport import RawLink
from peerd.wire.yamux.session import DATA, SYN
from peerd.wire.yamux.session import HEADER as FRAME
from peerd.wire.yamux.stream import YamuxConfig
from tests.worlds.network.hosts import Hosts, ask, echo, keypair, running_hosts
from tests.worlds.network.virtual import transport

Clock = trio.testing.MockClock


@asynccontextmanager
async def one_host(config: HostConfig | None = None) -> AsyncIterator[tuple[Hosts, Host]]:
    async with running_hosts() as hosts:
        host = await hosts.start("host", config)
        host.handle("/echo/1", echo)
        yield hosts, host


async def stranger(hosts: Hosts, name: str) -> RawLink:
    """A connection to the host by somebody who is no host."""
    return await transport(hosts.net, name).dial(hosts.addr("host"))


async def authenticated(hosts: Hosts, name: str) -> UpgradedLink:
    """A peer that has passed the hand-shake and then does as the test wants."""
    secrets = noise.Secrets(keypair(name), name.encode().ljust(32, b"s")).fresh(name.encode().ljust(32, b"e"))
    secured = await upgrade(await stranger(hosts, name), secrets, initiator=True)
    await trio.sleep(0.1)
    return secured


async def send_sealed(peer: UpgradedLink, plain: bytes) -> None:
    frame = memoryview(bytearray(noise.SEALED_BYTES))
    await peer.raw.send_all(frame[: peer.session.sealer.seal(plain, frame)])


async def ends(link: RawLink) -> float:
    """Read until the host closes; the time that took."""
    begin = trio.current_time()
    try:
        while await link.receive_some(1 << 16):
            pass
    except trio.BrokenResourceError:
        pass
    return trio.current_time() - begin


async def test_a_stranger_that_says_nothing_is_dropped_after_the_handshake_time(autojump_clock: Clock) -> None:
    async with one_host(HostConfig(handshake_s=5.0)) as (hosts, host):
        link = await stranger(hosts, "silent")
        assert await ends(link) == pytest.approx(5.0, abs=0.1)
        assert host.traffic().links == 0


@pytest.mark.parametrize(
    "junk",
    [b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(100), b"\xff" * 100, HEADER + encode_line("/noise") + b"\xff\xff" * 20],
    ids=["http", "zeros", "ones", "noise"],
)
async def test_a_stranger_that_talks_nonsense_is_dropped_at_once(autojump_clock: Clock, junk: bytes) -> None:
    async with one_host() as (hosts, host):
        link = await stranger(hosts, "junk")
        await link.send_all(junk)
        assert await ends(link) < 0.1
        assert host.connected() == []


async def test_half_open_strangers_give_way_so_that_peers_get_in(autojump_clock: Clock) -> None:
    async with one_host(HostConfig(half_open=8, handshake_s=60.0)) as (hosts, host):
        crowd = transport(hosts.net, "crowd")
        links = [await crowd.dial(hosts.addr("host")) for _ in range(30)]
        await trio.sleep(1)
        peer = await hosts.start("peer")
        await peer.connect(host.id, [hosts.addr("host")])
        assert await ask(peer, host, b"in") == b"in"
        closed = 0
        for link in links:
            with trio.move_on_after(0.01):
                await ends(link)
                closed += 1
        assert closed >= 22


async def test_a_full_host_closes_its_longest_idle_link_and_never_a_used_one(autojump_clock: Clock) -> None:
    async with one_host(HostConfig(links=LinkLimits(total=3, inbound=3))) as (hosts, host):
        peers = [await hosts.start(f"p{number}") for number in range(5)]
        streams = []
        for number in (0, 1, 2):
            await peers[number].connect(host.id, [hosts.addr("host")])
            await trio.sleep(1)
        busy = await peers[0].open_stream(host.id, "/echo/1")
        await busy.send(b"x")
        await busy.receive_exactly(1)
        streams.append(busy)
        peers[3].learn(host.id, [hosts.addr("host")])
        with pytest.raises(Unreachable):  # nobody has been idle for long
            await ask(peers[3], host, b"x")
        await trio.sleep(20)
        await peers[3].connect(host.id, [hosts.addr("host")])
        await trio.sleep(1)
        assert await ask(peers[3], host, b"x") == b"x"
        assert peers[1].connected() == []
        await busy.send(b"y")
        assert await busy.receive_exactly(1) == b"y"


async def test_a_peer_with_many_links_loses_its_oldest_and_stays_up(autojump_clock: Clock) -> None:
    async with one_host() as (hosts, host):
        with host.watch() as events:
            many = []
            for _ in range(limits.LINKS_PER_PEER + 3):
                secrets = noise.Secrets(keypair("many"), bytes(32)).fresh(b"e" * 32)
                raw = await transport(hosts.net, f"many{len(many)}").dial(hosts.addr("host"))
                many.append(await upgrade(raw, secrets, initiator=True))
                await trio.sleep(0.1)
            assert len(host.links) == limits.LINKS_PER_PEER
            assert await events.receive() == PeerUp(keypair("many").peer_id)
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()
            for link in many:
                await link.raw.aclose()
            down = await events.receive()
            assert isinstance(down, PeerDown)


async def test_a_stream_that_names_no_protocol_is_reset_after_a_while(autojump_clock: Clock) -> None:
    config = HostConfig(link=LinkConfig(negotiate_s=5.0, yamux=YamuxConfig(keepalive_s=2.0)))
    async with one_host(config) as (hosts, host):
        peer = await authenticated(hosts, "mute")
        await send_sealed(peer, FRAME.pack(0, DATA, SYN, 1, 5) + b"\x13/mul")
        await trio.sleep(1)
        (link,) = host.links
        assert link.mux.inbound == 1
        await trio.sleep(10)
        assert link.mux.inbound == 0
        assert not any(stream.negotiating and stream.mux.inbound for stream in link.streams)


async def test_data_beyond_the_window_ends_the_link(autojump_clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async with one_host() as (hosts, _):
        peer = await authenticated(hosts, "greedy")
        await send_sealed(peer, FRAME.pack(0, DATA, SYN, 1, 1 << 30))
        assert await ends(peer.raw) < 2
        assert "window" in caplog.text
        assert str(keypair("greedy").peer_id) in caplog.text


async def test_a_changed_byte_on_the_wire_ends_the_link(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with one_host() as (hosts, _):
        peer = await authenticated(hosts, "tampered")
        frame = bytearray(noise.SEALED_BYTES)
        size = peer.session.sealer.seal(b"hello", memoryview(frame))
        frame[size - 1] ^= 1
        await peer.raw.send_all(frame[:size])
        assert await ends(peer.raw) < 2
        assert "authenticate" in caplog.text


async def test_streams_beyond_the_limit_are_reset_and_places_come_back(autojump_clock: Clock) -> None:
    config = HostConfig(link=LinkConfig(yamux=YamuxConfig(streams_inbound=5)))
    async with one_host(config) as (hosts, host):
        peer = await hosts.start("peer")
        await peer.connect(host.id, [hosts.addr("host")])
        await trio.sleep(1)  # identify is over
        held = [await peer.open_stream(host.id, "/echo/1") for _ in range(5)]
        for stream in held:
            await stream.send(b"x")
            assert await stream.receive_exactly(1) == b"x"
        with pytest.raises(Unreachable, match="reset"):
            await ask(peer, host, b"one too many")
        for stream in held:
            await stream.aclose()
        await trio.sleep(1)
        assert await ask(peer, host, b"again") == b"again"


async def test_opening_waits_while_too_many_streams_are_open(autojump_clock: Clock) -> None:
    config = HostConfig(link=LinkConfig(yamux=YamuxConfig(streams_outbound=3)))
    async with one_host() as (hosts, host):
        peer = await hosts.start("peer", config)
        await peer.connect(host.id, [hosts.addr("host")])
        done = 0

        async def one() -> None:
            nonlocal done
            assert await ask(peer, host, b"x" * 1000) == b"x" * 1000
            done += 1

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(one)
        assert done == 50


async def test_a_peer_that_takes_nothing_is_given_up(autojump_clock: Clock) -> None:
    config = HostConfig(link=LinkConfig(stall_s=5.0, yamux=YamuxConfig(keepalive_s=1.0, dead_after_s=1000.0)))
    async with one_host(config) as (hosts, host):

        async def pour(stream: Stream) -> None:
            await stream.send(bytes(64 << 20))

        host.handle("/pour/1", pour)
        peer = await authenticated(hosts, "deaf")
        ask_for = HEADER + encode_line("/pour/1")
        with host.watch() as events:
            grant = FRAME.pack(0, 1, 0, 1, 1 << 30)
            await send_sealed(peer, FRAME.pack(0, DATA, SYN, 1, len(ask_for)) + ask_for + grant)
            event = await events.receive()
            while not isinstance(event, PeerDown):
                event = await events.receive()
        assert "accepted no data" in event.reason


async def test_a_watcher_that_does_not_read_costs_bounded_memory(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WATCH_EVENTS", 2)
    async with one_host() as (hosts, host):
        with host.watch() as events, caplog.at_level(logging.WARNING, logger="peerd.wire"):
            for number in range(4):
                await (await hosts.start(f"p{number}")).connect(host.id, [hosts.addr("host")])
            await trio.sleep(1)
            assert events.statistics().current_buffer_used == 2
        assert "is too slow; dropped event" in caplog.text
