"""Links with rails, over simulated long fat paths whose connections hold little: rate, calls, losses, intruders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields

import pytest
import trio
import trio.testing

from peerd.core.errors import Refused, Unreachable
from peerd.core.limits import RAILS, RAILS_PER_LINK
from peerd.wire.host.host import Host
from peerd.wire.link.link import Link
from peerd.wire.link.link_stream import Stream
from peerd.wire.link.rails import Rail
from peerd.wire.link.sealing import FrameSealer
from peerd.wire.link.upgrade import UpgradedLink, upgrade
from peerd.wire.noise.noise import Secrets
from peerd.wire.tcp_info import TcpInfo
from peerd.wire.yamux.striping import BINDING_BYTES
from peerd.wire.yamux.striping import PROTOCOL as RAIL
from tests.worlds.network.hostile import enter
from tests.worlds.network.hostile import secrets as hostile_secrets
from tests.worlds.network.hosts import Hosts, ask, echo, keypair, running_hosts
from tests.worlds.network.virtual import transport
from tests.worlds.simulation.memory import MemoryLink
from tests.worlds.simulation.simnet import NetConfig

Clock = trio.testing.MockClock
ONE_WAY_S = 0.025  # of each access line: 100 ms there and back
MBIT = 80.0  # 1 MB under way fills it
WINDOW = NetConfig(window_bytes=400 << 10)  # of each connection: 32 Mb/s
SINK = "/sink/1"
ZEROS = dict.fromkeys((field.name for field in fields(TcpInfo)), 0)


class Sink:
    """Takes all that comes, and counts it."""

    def __init__(self) -> None:
        self.bytes = 0

    async def __call__(self, stream: Stream) -> None:
        while view := await stream.receive_view(1 << 18):
            self.bytes += len(view)


@asynccontextmanager
async def pair(config: NetConfig | None = None) -> AsyncIterator[tuple[Hosts, Host, Host, Sink]]:
    line = {"latency_s": ONE_WAY_S, "up_mbit_s": MBIT, "down_mbit_s": MBIT}
    async with running_hosts(config) as hosts:
        a, b = [await hosts.start(name, **line) for name in "ab"]
        sink = Sink()
        for host in (a, b):
            host.handle(SINK, sink)
            host.handle("/echo/1", echo)
        a.learn(b.id, [hosts.addr("b")])
        await a.connect(b.id)
        await trio.sleep(1)  # until the other side knows it, too
        yield hosts, a, b, sink


async def flood(host: Host, other: Host) -> None:
    """Send for ever, on one stream."""
    stream = await host.open_stream(other.id, SINK)
    data = bytes(1 << 20)
    while True:
        await stream.send(data)


def link_of(host: Host, other: Host) -> Link:
    link = host.links.best(other.id)
    assert link is not None
    return link


@pytest.mark.slow
async def test_what_passes_the_line_is_counted_on_all_connections_of_a_link(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = TcpInfo(**ZEROS)
    monkeypatch.setattr(MemoryLink, "tcp_info", lambda self: info, raising=False)
    async with pair(WINDOW) as (hosts, a, b, _):
        link = link_of(a, b)
        assert len(link.tcp_infos()) == 1
        hosts.nursery.start_soon(flood, a, b)
        await trio.sleep(3)
        assert len(link.rails) > 0
        assert len(link.tcp_infos()) == 1 + len(link.rails)


@pytest.mark.slow
@pytest.mark.parametrize("dialer_sends", [True, False])
async def test_whoever_sends_none_of_its_rails_sends_much_faster_than_its_share(
    dialer_sends: bool, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, paces = defaultdict[MemoryLink, int](int), dict[Rail, float]()
    send_all = MemoryLink.send_all

    async def counted(self: MemoryLink, data: bytes | bytearray | memoryview) -> None:
        await send_all(self, data)
        sent[self] += len(data)

    def info(self: MemoryLink) -> TcpInfo:
        return TcpInfo(**ZEROS | {"bytes_acked": sent[self]})

    monkeypatch.setattr(MemoryLink, "send_all", counted)
    monkeypatch.setattr(MemoryLink, "tcp_info", info, raising=False)
    monkeypatch.setattr(Rail, "pace", lambda self, bytes_per_s: paces.update({self: bytes_per_s}))
    async with pair(WINDOW) as (hosts, a, b, _):
        sender, taker = (a, b) if dialer_sends else (b, a)
        hosts.nursery.start_soon(flood, sender, taker)
        await trio.sleep(5)
        rails = link_of(sender, taker).rails
        assert len(rails) >= 2
        together = sum(pace for rail, pace in paces.items() if rail.raw in rails.raws())
        assert together == pytest.approx(4 / 3 * 40e6), "a line of 10 MB/s is a slow one"


@pytest.mark.slow
@pytest.mark.parametrize("dialer_sends", [True, False])
async def test_one_stream_fills_a_line_that_one_connection_cannot(dialer_sends: bool, autojump_clock: Clock) -> None:
    async with pair(WINDOW) as (hosts, a, b, sink):
        hosts.nursery.start_soon(flood, *((a, b) if dialer_sends else (b, a)))
        await trio.sleep(3)
        before = sink.bytes
        await trio.sleep(5)
        assert (sink.bytes - before) * 8 / 5e6 >= 0.9 * MBIT
        assert 2 <= len(link_of(a, b).rails) == len(link_of(b, a).rails) <= RAILS_PER_LINK


@pytest.mark.slow
async def test_a_busy_machine_is_not_far_away(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers take long, those of its system do not."""
    near = TcpInfo(52, 1e-4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    monkeypatch.setattr(MemoryLink, "tcp_info", lambda link: near, raising=False)
    async with pair(WINDOW) as (hosts, a, b, sink):
        hosts.nursery.start_soon(flood, a, b)
        await trio.sleep(3)
        assert sink.bytes > 4 << 20
        assert len(link_of(a, b).rails) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("told_s", "waits_s"), [(0.13, 0.03), (0.09, 0.0), (0.02, None)])
async def test_what_the_system_says_of_the_round_trip_is_what_waits_unless_it_is_of_another_path(
    told_s: float, waits_s: float | None, autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = TcpInfo(**ZEROS | {"min_rtt_s": 0.1, "receive_rtt_s": told_s})
    monkeypatch.setattr(MemoryLink, "tcp_info", lambda link: info, raising=False)
    async with pair(WINDOW) as (hosts, a, b, _):
        hosts.nursery.start_soon(flood, a, b)
        await trio.sleep(5)
        now, pings = trio.current_time(), link_of(b, a).mux.pings
        if waits_s is None:
            assert pings._news(now) is None, "a proxy is near, the peer is not"
        else:
            assert pings.queue_s(now, 0.1) == pytest.approx(waits_s)


@pytest.mark.slow
async def test_a_small_call_beside_it_waits_for_little_more_than_its_round_trip(autojump_clock: Clock) -> None:
    async with pair(WINDOW) as (hosts, a, b, _):
        hosts.nursery.start_soon(flood, a, b)
        await trio.sleep(3)
        took = []
        for _ in range(20):
            begin = trio.current_time()
            await ask(a, b, b"x" * 100)
            took.append(trio.current_time() - begin)
            await trio.sleep(0.05)
        assert max(took) < 1.5 * 0.1 + 0.02


@pytest.mark.slow
async def test_what_travels_on_rails_arrives_unchanged_both_ways(autojump_clock: Clock) -> None:
    async with pair(WINDOW) as (_, a, b, _):
        data = bytes(range(256)) * (6 << 12)
        for _ in range(3):
            assert await ask(a, b, data) == data
        assert len(link_of(a, b).rails) >= 2


@pytest.mark.slow
async def test_a_small_message_that_grows_before_it_has_left_goes_on_rails_at_once(autojump_clock: Clock) -> None:
    """It was in the line of the first connection, which leaves it to rails that rest."""
    async with pair(WINDOW) as (_, a, b, sink):
        with trio.move_on_after(4):
            await flood(a, b)
        stream = await a.open_stream(b.id, SINK)
        await stream.send(b"heard of")
        await trio.sleep(1)
        assert len(link_of(a, b).rails) >= 2
        before = sink.bytes
        with trio.fail_after(2):
            await stream.send(b"head")
            await stream.send(bytes(1 << 20))
        await trio.sleep(2)
        assert sink.bytes - before == 4 + (1 << 20)


@pytest.mark.slow
async def test_a_reader_that_stops_stops_nobody_else(autojump_clock: Clock) -> None:
    async with pair(WINDOW) as (hosts, a, b, sink):
        hosts.nursery.start_soon(flood, a, b)
        await trio.sleep(3)

        async def deaf(stream: Stream) -> None:
            await trio.sleep_forever()

        async def flood_the_deaf() -> None:
            stream = await a.open_stream(b.id, "/deaf/1")
            while True:
                await stream.send(bytes(1 << 20))

        b.handle("/deaf/1", deaf)
        for _ in range(3):
            hosts.nursery.start_soon(flood_the_deaf)
        await trio.sleep(6)
        before = sink.bytes
        await trio.sleep(3)
        assert (sink.bytes - before) * 8 / 3e6 >= 0.8 * MBIT
        assert await ask(a, b, b"still here") == b"still here"


@pytest.mark.slow
async def test_the_first_connection_never_rests_while_rails_take_the_bulk(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone: dict[Link, list[bool]] = {}
    monkeypatch.setattr(Link, "left_to_small", lambda link, small: alone.setdefault(link, []).append(small))
    async with pair(WINDOW) as (_, a, b, _):
        with trio.move_on_after(5):
            await flood(a, b)
        links = [link_of(a, b), link_of(b, a)]
        assert [alone[link][0] for link in links] == [False, False], "its start would be lost"
        assert [alone[link][-1] for link in links] == [True, True]
        await trio.sleep(60)
        assert [len(link.rails) for link in links] == [0, 0]
        assert [alone[link][-1] for link in links] == [False, False]


@pytest.mark.slow
async def test_idle_rails_are_closed_by_both_sides_and_opened_anew(autojump_clock: Clock) -> None:
    async with pair(WINDOW) as (_, a, b, sink):
        for _ in range(2):
            with trio.move_on_after(4):
                await flood(a, b)
            assert len(link_of(a, b).rails) == len(link_of(b, a).rails) >= 2
            before = sink.bytes
            await trio.sleep(90)
            assert len(link_of(a, b).rails) == len(link_of(b, a).rails) == 0
            assert sink.bytes > before
            assert await ask(a, b, b"the link lives on") == b"the link lives on"
        assert len(a.links) == len(b.links) == 1


@pytest.mark.slow
async def test_a_rail_that_breaks_ends_its_link_and_peers_meet_again(autojump_clock: Clock) -> None:
    async with pair(WINDOW) as (hosts, a, b, _):
        link = link_of(a, b)
        with trio.move_on_after(4):
            await flood(a, b)
        first, *others = hosts.net.nodes["a"].links
        assert len(others) >= 2
        others[0].fail("cut by the test")
        await trio.sleep(5)
        assert not link.usable
        assert link.reason is not None
        assert "broke" in link.reason
        assert await ask(a, b, b"again") == b"again"
        assert link_of(a, b) is not link
        assert not [each for each in hosts.net.nodes["a"].links if each in (first, *others)]


async def rail_of(hosts: Hosts, name: str) -> UpgradedLink:
    """A connection to b that wants to be a rail, by a peer of that name."""
    raw = await transport(hosts.net, f"{name}2", latency_s=ONE_WAY_S).dial(hosts.addr("b"))
    secrets = Secrets(keypair(name), bytes(32), bytes(range(32)))
    return await upgrade(raw, secrets, initiator=True, muxers=(RAIL,))


async def say(secured: UpgradedLink, plain: bytes) -> None:
    await secured.raw.send_all(FrameSealer(secured.session.sealer, memoryview(b""), None).one(plain))


async def is_closed(secured: UpgradedLink) -> bool:
    with trio.move_on_after(60):
        try:
            return await secured.raw.receive_some(10) == b""
        except trio.BrokenResourceError:
            return True
    return False


@pytest.mark.parametrize("name", ["a", "stranger"])
@pytest.mark.parametrize("what", [bytes(BINDING_BYTES), b"", b"x" * 31, b"x" * 33, None])
async def test_who_does_not_name_a_link_of_its_own_is_turned_away(
    name: str, what: bytes | None, autojump_clock: Clock
) -> None:
    async with pair() as (hosts, a, b, _):
        secured = await rail_of(hosts, name)
        if what is not None:
            await say(secured, what)
        assert await is_closed(secured)
        assert len(link_of(b, a).rails) == 0
        assert await ask(a, b, b"unharmed") == b"unharmed"


async def test_even_the_right_name_helps_no_other_peer(autojump_clock: Clock) -> None:
    async with pair() as (hosts, a, b, _):
        secured = await rail_of(hosts, "stranger")
        await say(secured, link_of(a, b).rails.binding)
        assert await is_closed(secured)
        assert len(link_of(b, a).rails) == 0


async def test_rails_beyond_the_limit_are_turned_away(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b, _):
        kept = []
        for _ in range(RAILS_PER_LINK + 3):
            secured = await a.open_rail(link_of(a, b))
            await say(secured, link_of(a, b).rails.binding)
            kept.append(secured)
        await trio.sleep(1)
        assert len(link_of(b, a).rails) == RAILS_PER_LINK
        assert all([await is_closed(secured) for secured in kept[RAILS_PER_LINK:]])
        assert await ask(a, b, b"unharmed") == b"unharmed"


async def test_a_peer_that_knows_no_rails_is_left_alone(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        raw_a = transport(hosts.net, "x")
        listener = await raw_a.listen(hosts.addr("x"))
        near = await transport(hosts.net, "y").dial(listener.addrs[0])
        far = await listener.accept()
        secrets = [Secrets(keypair(name), bytes(32), name.encode() * 32) for name in "xy"]
        failures = []

        async def answer() -> None:
            try:
                await upgrade(far, secrets[0], initiator=False)
            except Unreachable:
                failures.append("the other side left")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            with pytest.raises(Refused):
                await upgrade(near, secrets[1], initiator=True, muxers=(RAIL,))
            await near.aclose()
        assert failures == ["the other side left"]


async def test_garbage_on_a_rail_ends_the_link_and_names_the_peer(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (_, a, b, _):
        link = link_of(b, a)
        secured = await a.open_rail(link_of(a, b))
        await say(secured, link_of(a, b).rails.binding)
        await say(secured, b"\x00\x09 no such frame")
        await trio.sleep(3)
        assert not link.usable
        assert f"peer {a.id}" in caplog.text
        assert "violated the protocol" in caplog.text


async def crowd(hosts: Hosts, place: str, count: int) -> None:
    """So many identities at one address, each with a link and as many rails as it can get."""
    network = transport(hosts.net, place)
    for number in range(count):
        who = hostile_secrets(f"{place} {number}")
        first = await enter(network, hosts.addr("b"), who)
        await trio.sleep(0.1)
        assert first.secured is not None
        for rail in range(RAILS_PER_LINK):
            more = await enter(network, hosts.addr("b"), who, bytes([rail + 1] * 32), (RAIL,))
            await more.say(first.secured.session.binding)
    await trio.sleep(0.1)


@pytest.mark.slow
async def test_neither_one_peer_nor_one_place_takes_all_rails(autojump_clock: Clock) -> None:
    async with pair() as (hosts, a, b, _):
        taken = []
        for place, count in (("first", 6), ("second", 4), ("third", 2)):
            before = sum(len(link.rails) for link in b.links)
            await crowd(hosts, place, count)
            taken.append(sum(len(link.rails) for link in b.links) - before)
        assert taken == [RAILS // 2, RAILS // 4, RAILS // 8]
        secured = await a.open_rail(link_of(a, b))
        await say(secured, link_of(a, b).rails.binding)
        await trio.sleep(1)
        assert len(link_of(b, a).rails) == 1
        assert await ask(a, b, b"unharmed") == b"unharmed"
