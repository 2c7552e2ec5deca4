"""Every transport keeps the same promises."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import trio
import trio.testing

from peerd.core.addr import parse_addr, tcp_place
from peerd.core.errors import ConfigError, Unreachable
from peerd.wire.tcp.tcp_transport import TcpLink, TcpTransport
from peerd.wire.transport import LendingLink
from tests.wire.compliance import LOOPBACK, Ends, TransportCompliance, on_loopback, read_exactly
from tests.worlds.network.virtual import addr_of, running_net, transport


class TestMemory(TransportCompliance):
    @asynccontextmanager
    async def ends(self) -> AsyncIterator[Ends]:
        async with running_net() as net:
            dialer, answerer = transport(net, "a"), transport(net, "b")
            listener = await answerer.listen(addr_of(net, "b"))
            near = await dialer.dial(listener.addrs[0])
            far = await listener.accept()
            yield Ends(dialer, answerer, listener, near, far)
            for end in (near, far, listener):
                await end.aclose()


@pytest.mark.socket
class TestTcp(TransportCompliance):
    @pytest.fixture
    def autojump_clock(self) -> None:
        """Sockets live in real time."""

    def ends(self) -> AbstractAsyncContextManager[Ends]:
        tcp = TcpTransport()
        return on_loopback(tcp, tcp)


@pytest.mark.socket
async def test_a_wildcard_listener_names_concrete_addresses_with_loopback_last() -> None:
    listener = await TcpTransport().listen(parse_addr("/ip4/0.0.0.0/tcp/0"))
    places = [place for addr in listener.addrs if (place := tcp_place(addr)) is not None]
    assert places[-1].host == "127.0.0.1"
    assert all(place.host != "0.0.0.0" and place.port > 0 for place in places)
    await listener.aclose()


@pytest.mark.socket
async def test_a_name_is_resolved_and_an_unknown_name_says_so() -> None:
    tcp = TcpTransport()
    listener = await tcp.listen(LOOPBACK)
    place = tcp_place(listener.addrs[0])
    assert place is not None
    link = await tcp.dial(parse_addr(f"/dns4/localhost/tcp/{place.port}"))
    await link.aclose()
    with pytest.raises(Unreachable, match=r"cannot be resolved"):
        await tcp.dial(parse_addr("/dns4/no-such-host.invalid/tcp/1"))
    await listener.aclose()


@pytest.mark.socket
@pytest.mark.parametrize("text", ["/dns4/localhost/tcp/1", "/ip4/198.51.100.1/tcp/0"])
async def test_where_one_cannot_listen_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        await TcpTransport().listen(parse_addr(text))


@pytest.mark.socket
async def test_a_refused_connection_says_so_in_words() -> None:
    with pytest.raises(Unreachable, match="connection refused"):
        await TcpTransport().dial(parse_addr("/ip4/127.0.0.1/tcp/1"))


@pytest.mark.socket
async def test_a_reader_is_not_woken_for_less_than_is_useful_and_asks_anew_each_time() -> None:
    tcp = TcpTransport()
    listener = await tcp.listen(LOOPBACK)
    near = await tcp.dial(listener.addrs[0])
    far = await listener.accept()
    assert isinstance(far, LendingLink)
    found: list[int] = []

    async def read(useful_bytes: int) -> None:
        found.append(len(await far.receive_view(useful_bytes)))

    with trio.fail_after(60):
        for useful, rest in ((10_000, 9_900), (200_000, 199_900)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, useful)
                await near.send_all(bytes(100))
                await trio.testing.wait_all_tasks_blocked()
                await near.send_all(bytes(rest))
            if useful == 10_000:
                assert found == [10_000]
        while sum(found) < 210_000:  # more than its buffer holds may come in two
            await read(1)
        await near.send_all(b"!")
        await read(1)
    assert found[-1] == 1
    for end in (near, far, listener):
        await end.aclose()


@pytest.mark.parametrize("rule", ["bbr", "cubic", "reno"])
async def test_a_connection_for_small_frames_does_not_rest_until_it_may(rule: str) -> None:
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        pytest.skip("this system lets nobody choose")
    tcp = TcpTransport()
    listener = await tcp.listen(LOOPBACK)
    near = await tcp.dial(listener.addrs[0])
    assert isinstance(near, TcpLink)

    def found() -> str:
        return near._socket.getsockopt(socket.IPPROTO_TCP, option, 16).rstrip(b"\0").decode()

    try:
        near._socket.setsockopt(socket.IPPROTO_TCP, option, rule.encode())
    except OSError:
        pytest.skip(f"this system has no {rule}, or does not let us choose it")
    else:
        rules = []
        for always in (False, True, True, False, False):
            near.never_rest(always)
            rules.append(found())
        quick = "reno" if rule == "bbr" else rule
        assert rules == [rule, quick, quick, rule, rule]
    finally:
        for end in (near, listener):
            await end.aclose()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is paced")
async def test_a_paced_link_near_by_keeps_its_rate_and_room_for_what_waits() -> None:
    tcp = TcpTransport()
    listener = await tcp.listen(LOOPBACK)
    near = await tcp.dial(listener.addrs[0])
    assert isinstance(near, TcpLink)

    def room_bytes() -> int:
        return near._socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)

    near._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
    near.pace(1e5)
    rule = near._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert not rule.startswith(b"bbr")
    assert near._socket.getsockopt(socket.SOL_SOCKET, 47) == 100_000, "SO_MAX_PACING_RATE"
    assert room_bytes() >= 4 * near._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) > 0
    near._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 400_000)
    larger = room_bytes()
    near.pace(2e5)
    assert room_bytes() == larger, "nothing is taken away"
    near.pace(math.inf)
    assert near._socket.getsockopt(socket.SOL_SOCKET, 47) > 2e9
    for end in (near, listener):
        await end.aclose()


async def test_a_link_that_begins_small_and_leaves_evenly_delivers_all_the_same() -> None:
    tcp = TcpTransport()
    listener = await tcp.listen(LOOPBACK)
    near = await tcp.dial(listener.addrs[0])
    far = await listener.accept()
    assert isinstance(near, LendingLink)
    usual_bytes = near.batch_bytes
    near.begin_small()
    assert near.batch_bytes < usual_bytes
    data = bytes(range(256)) * 1000
    with trio.fail_after(60):
        for bytes_per_s in (1e8, 1e12):
            near.pace(bytes_per_s)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(near.send_all, data)
                assert await read_exactly(far, len(data)) == data
    for end in (near, far, listener):
        await end.aclose()
