"""Dials leave from the port on which their host listens; two that cross become one connection. Real sockets."""

from __future__ import annotations

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from peerd.core.addr import parse_addr, tcp_addr, tcp_place
from peerd.core.errors import ConfigError
from peerd.core.keys import Keypair
from peerd.wire.link.upgrade import UpgradedLink, upgrade
from peerd.wire.noise.noise import Secrets
from peerd.wire.tcp import tcp_transport
from peerd.wire.tcp.tcp_transport import TcpLink, TcpTransport
from peerd.wire.transport import Listener

pytestmark = [
    pytest.mark.socket,
    pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8, and a port that sockets can share"),
]
HERE, THERE = "127.0.0.1", "127.0.0.2"


@pytest.fixture(autouse=True)
def _loopback_is_like_any_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_transport, "_is_loopback", lambda _: False)


@asynccontextmanager
async def listening(host: str) -> AsyncIterator[tuple[TcpTransport, Listener, int]]:
    transport = TcpTransport()
    listener = await transport.listen(tcp_addr(host, 0))
    place = tcp_place(listener.addrs[0])
    assert place is not None
    try:
        with trio.fail_after(60):
            yield transport, listener, place.port
    finally:
        with trio.CancelScope(shield=True):
            await listener.aclose()


def port_of(addr: Multiaddr) -> int:
    place = tcp_place(addr)
    assert place is not None
    return place.port


async def test_a_dial_leaves_from_the_listening_port_and_a_fresh_or_second_one_does_not() -> None:
    async with listening(HERE) as (near, _, port), listening(THERE) as (_, far, _):
        seen, links = [], []
        for fresh in (True, False, False):
            links.append(await near.dial(far.addrs[0], fresh=fresh))
            links.append(await far.accept())
            seen.append(port_of(links[-1].remote))
        assert seen[1] == port
        assert port not in (seen[0], seen[2])  # the second pair of the same ends is taken
        for link in links:
            await link.aclose()


async def test_who_does_not_listen_or_listens_on_loopback_only_dials_from_any_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    async with listening(HERE) as (near, _, port), listening(THERE) as (_, far, _):
        for transport in (near, TcpTransport()):
            link = await transport.dial(far.addrs[0])
            other = await far.accept()
            assert port_of(other.remote) != port
            await link.aclose()
            await other.aclose()


async def test_a_dial_to_where_the_listening_address_does_not_lead_leaves_from_any_port() -> None:
    """Packets to 127.0.0.1 leave with that address, not with 127.0.0.2."""
    async with listening(HERE) as (_, far, _), listening(THERE) as (near, _, port):
        link = await near.dial(far.addrs[0])
        other = await far.accept()
        assert port_of(other.remote) != port
        await link.aclose()
        await other.aclose()


async def test_a_port_that_another_program_listens_on_is_not_shared_with_it() -> None:
    async with listening("0.0.0.0") as (_, _, port):
        for host in ("0.0.0.0", HERE):
            with pytest.raises(ConfigError, match="address already in use"):
                await TcpTransport().listen(parse_addr(f"/ip4/{host}/tcp/{port}"))
    with socket.socket() as foreign:
        foreign.bind(("0.0.0.0", port))
        foreign.listen()
        with pytest.raises(ConfigError, match="address already in use"):
            await TcpTransport().listen(parse_addr(f"/ip4/0.0.0.0/tcp/{port}"))


async def test_one_can_listen_again_where_connections_of_before_still_live() -> None:
    async with AsyncExitStack() as stack:
        near, own, port = await stack.enter_async_context(listening(HERE))
        _, far, _ = await stack.enter_async_context(listening(THERE))
        out = await near.dial(far.addrs[0])
        other = await far.accept()
        await own.aclose()
        again = await near.listen(tcp_addr(HERE, port))
        assert port_of(again.addrs[0]) == port
        await out.send_all(b"x")
        assert await other.receive_some(10) == b"x"
        for end in (again, out, other):
            await end.aclose()


@asynccontextmanager
async def deaf_port() -> AsyncIterator[int]:
    """A port that drops connection requests in silence, as routers do: its queue is full."""
    async with AsyncExitStack() as stack:
        plug = stack.enter_context(socket.socket())
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        plug.bind((THERE, 0))
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        plug.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(plug.getsockname())
        yield plug.getsockname()[1]


async def test_two_that_dial_each_other_at_once_share_one_connection_and_agree_on_who_is_who() -> None:
    names = [Keypair.from_seed(bytes([number]) * 32) for number in (1, 2)]
    ends: dict[int, TcpLink] = {}
    secured: dict[int, UpgradedLink] = {}
    async with listening(HERE) as (near, own, port), deaf_port() as there:
        places = [(HERE, port), (THERE, there)]
        await own.aclose()  # nobody listens here: only the crossing can connect them

        async def dial(number: int) -> None:
            ends[number] = await near._connect_from(socket.AF_INET, places[number], places[1 - number])

        async def secure(number: int) -> None:
            secrets = Secrets(names[number], bytes([7]) * 32, bytes([40 + number]) * 32)
            expected = names[1 - number].peer_id
            secured[number] = await upgrade(ends[number], secrets, initiator=True, expected=expected)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dial, 0)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(dial, 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(secure, 0)
            nursery.start_soon(secure, 1)
        assert secured[0].initiator is not secured[1].initiator
        assert [end.session.muxer for end in secured.values()] == ["/yamux/1.0.0"] * 2
        for end in ends.values():
            await end.aclose()
