"""Hosts over a simulated network: reaching peers, streams, refusals, failures, leaving."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from peerd.core.addr import parse_addr, with_peer
from peerd.core.errors import ConfigError, LocalError, ProtocolViolation, Refused, Unreachable
from peerd.wire.host.host import Host, HostConfig, PeerDown, PeerUp
from peerd.wire.link.config import LinkConfig
from peerd.wire.link.link_stream import Stream
from peerd.wire.yamux.stream import YamuxConfig
from tests.worlds.network.hosts import Hosts, ask, echo, echoing, keypair, running_hosts
from tests.worlds.simulation.simnet import NetConfig

Clock = trio.testing.MockClock


@asynccontextmanager
async def pair(**line: float) -> AsyncIterator[tuple[Hosts, Host, Host]]:
    """Two hosts, of which `a` has dialed `b`."""
    async with echoing("a", "b", **line) as (hosts, a, b):
        await a.connect(b.id, [hosts.addr("b")])
        yield hosts, a, b


async def test_two_hosts_know_each_other_by_name_and_streams_carry_data_both_ways(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):
        seen = []

        async def greet(stream: Stream) -> None:
            seen.append((stream.peer, stream.protocol))
            await stream.send(b"hello " + await stream.receive_exactly(1))

        a.handle("/greet/1", greet)
        stream = await b.open_stream(a.id, "/greet/1")
        await stream.send(b"b")
        assert await stream.receive_exactly(7) == b"hello b"
        assert await stream.receive_some(1) == b""
        assert seen == [(b.id, "/greet/1")]
        assert await ask(a, b, bytes(3 << 20)) == bytes(3 << 20)
        assert a.connected() == [b.id]
        assert b.connected() == [a.id]
        assert await a.ping(b.id) >= 0


async def test_a_connection_costs_two_round_trips_and_a_call_on_it_one(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a", latency_s=0.05), await hosts.start("b", latency_s=0.05)
        b.handle("/echo/1", echo)
        begin = trio.current_time()
        await a.connect(b.id, [hosts.addr("b")])
        assert trio.current_time() - begin == pytest.approx(0.4, abs=0.01)
        begin = trio.current_time()
        await ask(a, b, b"x" * 100)
        assert trio.current_time() - begin == pytest.approx(0.2, abs=0.01)


async def test_somebody_else_at_the_address_is_unreachable_and_both_are_named(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        wanted = keypair("wanted").peer_id
        with pytest.raises(Unreachable) as caught:
            await a.connect_addr(with_peer(hosts.addr("b"), wanted))
        assert str(wanted) in str(caught.value)
        assert str(b.id) in str(caught.value)
        assert await a.connect_addr(hosts.addr("b")) == b.id
        assert a.known_addrs(b.id) == [hosts.addr("b")]


async def test_every_address_that_failed_is_listed_with_its_reason(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a = await hosts.start("a")
        ghost = keypair("ghost").peer_id
        with pytest.raises(Unreachable, match="no address is known"):
            await a.connect(ghost)
        places = [parse_addr("/ip4/10.9.9.9/tcp/1"), parse_addr("/dns4/ghost.example/tcp/2")]
        with pytest.raises(Unreachable) as caught:
            await a.connect(ghost, places)
        assert all(str(place) in str(caught.value) for place in places)
        assert caught.value.peer == ghost


async def test_a_host_does_not_connect_to_itself(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a = await hosts.start("a")
        for attempt in (a.connect(a.id, [hosts.addr("a")]), a.connect_addr(hosts.addr("a"))):
            with pytest.raises(Unreachable, match="itself"):
                await attempt


async def test_many_who_want_the_same_peer_share_one_dial(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a", latency_s=0.1), await hosts.start("b")
        b.handle("/echo/1", echo)
        a.learn(b.id, [hosts.addr("b")])
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask, a, b, b"x")
        assert a.traffic().links == 1


async def test_a_caller_who_gives_up_leaves_the_dial_to_the_others(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a", latency_s=0.2), await hosts.start("b")
        a.learn(b.id, [hosts.addr("b")])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.connect, b.id)
            with trio.move_on_after(0.1) as scope:
                await a.connect(b.id)
            assert scope.cancelled_caught
        assert a.connected() == [b.id]


async def test_a_dial_that_nobody_waits_for_ends(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a", latency_s=0.2), await hosts.start("b")
        with trio.move_on_after(0.1):
            await a.connect(b.id, [hosts.addr("b")])
        await trio.sleep(5)
        assert a.connected() == []
        assert b.traffic().links == 0
        await a.connect(b.id)
        assert a.connected() == [b.id]


async def test_peers_that_dial_each_other_at_once_end_up_connected_and_lose_nothing(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a", latency_s=0.05), await hosts.start("b", latency_s=0.05)
        a.handle("/echo/1", echo)
        b.handle("/echo/1", echo)
        a.learn(b.id, [hosts.addr("b")])
        b.learn(a.id, [hosts.addr("a")])
        with a.watch() as of_a, b.watch() as of_b:
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(ask, a, b, bytes(100_000))
                    nursery.start_soon(ask, b, a, bytes(100_000))
            assert of_a.receive_nowait() == PeerUp(b.id)
            assert of_b.receive_nowait() == PeerUp(a.id)
            for watcher in (of_a, of_b):
                with pytest.raises(trio.WouldBlock):
                    watcher.receive_nowait()


async def test_an_unknown_protocol_is_refused_by_name(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):
        stream = await a.open_stream(b.id, "/nope/1")
        await stream.send(b"optimistic")
        with pytest.raises(Refused, match="/nope/1"):
            await stream.receive_some(1)
        with pytest.raises(Refused):
            await stream.send(b"more")
        await stream.aclose()
        assert await ask(a, b, b"the link lives") == b"the link lives"
        assert a.traffic().streams == 0


async def test_a_handler_that_crashes_costs_its_stream_only(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (_, a, b):

        async def crash(stream: Stream) -> None:
            await stream.receive_exactly(1)
            raise ZeroDivisionError("a bug")

        b.handle("/crash/1", crash)
        stream = await a.open_stream(b.id, "/crash/1")
        await stream.send(b"x")
        with pytest.raises(Unreachable, match="reset"):
            await stream.receive_some(1)
        assert "ZeroDivisionError" in caplog.text
        assert await ask(a, b, b"still here") == b"still here"


async def test_a_stream_that_ends_early_is_a_violation_of_its_peer(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):

        async def short(stream: Stream) -> None:
            await stream.send(b"only this")

        b.handle("/short/1", short)
        for receive in ("receive_exactly", "receive_into"):
            stream = await a.open_stream(b.id, "/short/1")
            with pytest.raises(ProtocolViolation) as caught:
                await getattr(stream, receive)(100 if receive == "receive_exactly" else bytearray(100))
            assert caught.value.peer == b.id
            await stream.aclose()


async def test_what_is_received_into_a_buffer_is_what_was_sent(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):
        data = bytes(range(256)) * 4096
        stream = await a.open_stream(b.id, "/echo/1")
        into = bytearray(len(data))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, data)
            await stream.receive_into(into)
        assert into == data
        await stream.aclose()


async def test_who_stops_waiting_for_a_buffer_knows_how_far_it_came(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):
        data = bytes(range(251)) * 4096

        async def pause_half_way(stream: Stream) -> None:
            await stream.send(data[:300_000])
            await trio.sleep(10)
            await stream.send(data[300_000:])

        b.handle("/halves/1", pause_half_way)
        stream = await a.open_stream(b.id, "/halves/1")
        into, landed = bytearray(len(data)), [0]
        with trio.move_on_after(5):
            await stream.receive_into(into, landed.append)
        assert sum(landed) == 300_000
        await stream.receive_into(memoryview(into)[300_000:])
        assert into == data
        await stream.aclose()


async def test_a_slow_reader_slows_its_own_writer_and_nobody_else(autojump_clock: Clock) -> None:
    async with pair(latency_s=0.01) as (_, a, b):
        gate = trio.Event()
        taken = 0

        async def slow(stream: Stream) -> None:
            nonlocal taken
            await gate.wait()
            while data := await stream.receive_some(1 << 20):
                taken += len(data)

        b.handle("/slow/1", slow)
        stream = await a.open_stream(b.id, "/slow/1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, bytes(8 << 20))
            await trio.sleep(5)
            for _ in range(10):
                begin = trio.current_time()
                await ask(a, b, bytes(50_000))
                assert trio.current_time() - begin < 0.1
            assert b.traffic().bytes_in < 2 << 20
            gate.set()
        await stream.aclose()
        await trio.sleep(1)
        assert taken == 8 << 20


async def test_a_send_that_is_cancelled_half_way_resets_its_stream_and_no_more(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):
        outcome: list[str] = []

        async def never_read(stream: Stream) -> None:
            await trio.sleep(100)
            try:
                while await stream.receive_some(1 << 20):
                    pass
                outcome.append("end")
            except Unreachable:
                outcome.append("reset")

        b.handle("/stuck/1", never_read)
        stream = await a.open_stream(b.id, "/stuck/1")
        with trio.move_on_after(1):
            await stream.send(bytes(10 << 20))
        with pytest.raises(Unreachable):
            await stream.send(b"x")
        assert await ask(a, b, b"fine") == b"fine"
        await trio.sleep(200)
        assert outcome == ["reset"]


async def test_a_send_that_is_cancelled_before_it_began_takes_nothing_with_it(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):
        gate, got = trio.Event(), bytearray()

        async def later(stream: Stream) -> None:
            await gate.wait()
            while data := await stream.receive_some(1 << 20):
                got.extend(data)

        b.handle("/later/1", later)
        stream = await a.open_stream(b.id, "/later/1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.send, b"a" * (1 << 20))
            await trio.sleep(1)
            with trio.move_on_after(1) as scope:
                await stream.send(b"b" * (1 << 20))
            assert scope.cancelled_caught
            gate.set()
        await stream.send(b"c")
        await stream.aclose()
        await trio.sleep(1)
        assert bytes(got) == b"a" * (1 << 20) + b"c"


@pytest.mark.slow
async def test_sends_of_two_tasks_on_one_stream_do_not_mix(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):
        got = bytearray()

        async def collect(stream: Stream) -> None:
            while data := await stream.receive_some(1 << 20):
                got.extend(data)

        b.handle("/collect/1", collect)
        stream = await a.open_stream(b.id, "/collect/1")
        async with trio.open_nursery() as nursery:
            for letter in b"abcd":
                nursery.start_soon(stream.send, bytes([letter]) * 700_000)
        await stream.aclose()
        await trio.sleep(1)
        runs = [letter for at, letter in enumerate(got) if at % 700_000 == 0]
        assert sorted(runs) == list(b"abcd")
        assert bytes(got) == b"".join(bytes([letter]) * 700_000 for letter in runs)


async def test_a_cancelled_receive_loses_nothing(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):
        stream = await a.open_stream(b.id, "/echo/1")
        with trio.move_on_after(1):
            await stream.receive_some(10)
        await stream.send(b"0123456789")
        assert await stream.receive_exactly(10) == b"0123456789"
        await stream.aclose()


async def test_two_readers_on_one_stream_are_our_own_bug(autojump_clock: Clock) -> None:
    async with pair() as (_, a, b):
        stream = await a.open_stream(b.id, "/echo/1")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.receive_some, 1)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(LocalError):
                await stream.receive_some(1)
            nursery.cancel_scope.cancel()


async def test_leaving_is_told_at_once_and_ends_in_bounded_time(autojump_clock: Clock) -> None:
    async with pair(latency_s=0.02) as (hosts, a, b):
        stream = await a.open_stream(b.id, "/echo/1")
        await stream.send(b"x")
        await stream.receive_exactly(1)
        with a.watch() as events:
            begin = trio.current_time()
            await hosts.stop("b")
            assert trio.current_time() - begin < 2.1
            event = await events.receive()
            assert isinstance(event, PeerDown)
            assert event.peer == b.id
            assert "left" in event.reason
            assert trio.current_time() - begin < 2.1
        with pytest.raises(Unreachable):
            await stream.receive_some(1)
        await trio.sleep(1)
        assert a.connected() == []
        assert a.traffic().links == 0


async def test_a_killed_peer_is_noticed_at_once_and_a_silent_one_by_its_silence(autojump_clock: Clock) -> None:
    config = HostConfig(link=LinkConfig(yamux=YamuxConfig(keepalive_s=2.0, dead_after_s=6.0)))
    async with running_hosts() as hosts:
        a = await hosts.start("a", config)
        with a.watch() as events:
            for name, silent, within_s in (("b", False, 0.1), ("c", True, 8.1)):
                other = await hosts.start(name)
                await a.connect(other.id, [hosts.addr(name)])
                assert await events.receive() == PeerUp(other.id)
                await trio.sleep(1)
                begin = trio.current_time()
                hosts.net.kill(name, silent=silent)
                down = await events.receive()
                assert isinstance(down, PeerDown)
                assert trio.current_time() - begin <= within_s
                assert down.reason


async def test_an_idle_connection_lives_on(autojump_clock: Clock) -> None:
    async with pair(latency_s=0.1) as (_, a, b):
        with a.watch() as events:
            await trio.sleep(1000)
            with pytest.raises(trio.WouldBlock):
                events.receive_nowait()
        assert a.traffic().bytes_in < 20_000
        rtt_s = a.traffic().peers[b.id].rtt_s
        assert rtt_s == pytest.approx(0.4, abs=0.01)


async def test_both_sides_learn_addresses_protocols_and_how_they_are_seen(autojump_clock: Clock) -> None:
    async with pair() as (hosts, a, b):
        await trio.sleep(1)
        of_b, of_a = a.info(b.id), b.info(a.id)
        assert of_a is not None
        assert of_b is not None
        assert "/echo/1" in of_b.protocols
        assert of_b.agent.startswith("peerd/")
        assert of_a.addrs == (hosts.addr("a"),)
        assert of_b.observed is not None
        assert b.known_addrs(a.id) == [hosts.addr("a")]
        b.handle("/later/1", echo)
        await trio.sleep(1)
        pushed = a.info(b.id)
        assert pushed is not None
        assert "/later/1" in pushed.protocols
        await hosts.stop("b")
        await trio.sleep(2)
        assert a.info(b.id) is None


async def test_a_host_that_is_not_running_and_an_address_nobody_serves_are_said_so(autojump_clock: Clock) -> None:
    async with running_hosts() as hosts:
        a = await hosts.start("a")
        with pytest.raises(ConfigError, match="in use"):
            await a.run([hosts.addr("a")])
        with pytest.raises(ConfigError, match="no transport"):
            await a.run([parse_addr("/ip4/127.0.0.1/udp/1/quic-v1")])
        await hosts.stop("a")
        with pytest.raises(Unreachable, match="not running"):
            await a.connect(keypair("x").peer_id, [hosts.addr("a")])


async def test_a_protocol_violation_is_logged_with_the_peer_and_ends_the_link(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as (_, a, b):
        await trio.sleep(1)
        link = a.links.best(b.id)
        assert link is not None
        with b.watch() as events, caplog.at_level(logging.WARNING, logger="peerd.wire"):
            link.mux._frame(7, 0, 1, 0)  # no such frame type
            link.flush()
            down = await events.receive()
        assert isinstance(down, PeerDown)
        assert "violation" in down.reason
        assert str(a.id) in caplog.text
        await trio.sleep(2)
        assert a.connected() == []


@pytest.mark.slow
async def test_the_window_grows_with_a_long_fast_path(autojump_clock: Clock) -> None:
    """500 Mb/s and 100 ms: after 3 s a stream has 90 % of the line."""
    line = {"latency_s": 0.025, "up_mbit_s": 500.0, "down_mbit_s": 500.0}
    async with running_hosts(NetConfig(window_bytes=64 << 20)) as hosts:
        a, b = await hosts.start("a", **line), await hosts.start("b", **line)
        marks: list[tuple[float, int]] = []

        async def sink(stream: Stream) -> None:
            total = 0
            while data := await stream.receive_some(1 << 20):
                total += len(data)
                marks.append((trio.current_time(), total))

        b.handle("/sink/1", sink)
        await a.connect(b.id, [hosts.addr("b")])
        stream = await a.open_stream(b.id, "/sink/1")
        begin = trio.current_time()
        with trio.move_on_after(4):
            while True:
                await stream.send(bytes(1 << 20))
        late = [(at, total) for at, total in marks if at - begin >= 3]
        rate = (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])
        assert rate >= 0.9 * 500e6 / 8
