"""Hole punching as a service: roles towards others, pairs that fail, and what a hostile peer gets out of it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import pytest
import trio
from multiaddr import Multiaddr
from trio.testing import MockClock as Clock

from peerd.core import limits
from peerd.core.addr import parse_addr, tcp_addr
from peerd.core.errors import RemoteError, Unreachable
from peerd.reach.hole_punch import FIRST_PAUSE_S
from peerd.reach.messages.holepunch_message import DCUTR, HolePunch, PunchKind
from peerd.wire.host.identify import IDENTIFY_PUSH, send_identify
from peerd.wire.identify_message import Identify
from peerd.wire.link.delimited import receive_message, send_message
from peerd.wire.link.link_stream import Stream
from peerd.wire.path_selection import PathKind
from tests.worlds.network.homes import Neighbourhood, Peer, neighbourhood
from tests.worlds.network.hosts import ask

JUNK = [
    parse_addr(text)
    for text in ("/ip4/127.0.0.1/tcp/22", "/ip4/10.0.0.1/tcp/22", "/ip4/224.0.0.1/tcp/9", "/dns4/bank.example/tcp/80")
]


async def relayed(around: Neighbourhood, kind: str, agent: str = "") -> tuple[Peer, Peer]:
    """`a` has dialed `b` over the relay; both are behind routers of this kind."""
    a = await around.peer("a", kind, agent=agent)  # type: ignore[arg-type]
    b = await around.peer("b", kind, agent=agent)  # type: ignore[arg-type]
    for peer in (a, b):
        await around.settle(peer)
    await around.meet(a, b)
    return a, b


def dials(peer: Peer) -> list[Multiaddr]:
    """The addresses that `peer` dials from now on; a list that grows."""
    found: list[Multiaddr] = []
    dial = peer.home.dial

    async def noted(addr: Multiaddr, *, fresh: bool = False):  # type: ignore[no-untyped-def]
        found.append(addr)
        return await dial(addr, fresh=fresh)

    peer.home.dial = noted  # type: ignore[method-assign]
    return found


async def say(stream: Stream, kind: PunchKind, addrs: list[Multiaddr]) -> None:
    await send_message(stream, HolePunch(kind, tuple(addr.to_bytes() for addr in addrs)).encode())


@pytest.mark.parametrize("agent", ["", "github.com/x/go-libp2p-daemon", "js-libp2p/3.1.0"])
async def test_whoever_the_other_seems_to_be_a_crossing_ends_in_one_connection(
    autojump_clock: Clock, agent: str
) -> None:
    async with neighbourhood() as around:
        a, b = await relayed(around, "port-restricted", agent)
        await trio.sleep(10)
        assert a.host.traffic().peers[b.host.id].way == b.host.traffic().peers[a.host.id].way == "punched"
        assert await ask(a.host, b.host, b"there") == b"there"


async def test_a_relay_that_pushes_no_observed_address_still_lets_its_peers_meet(autojump_clock: Clock) -> None:
    async with neighbourhood() as around:
        relay = around.relay.host
        a, b = [await around.peer(name, "port-restricted") for name in "ab"]
        for peer in (a, b):
            await around.settle(peer)
            push = await relay.open_stream(peer.host.id, IDENTIFY_PUSH)  # as js-libp2p does
            await send_identify(
                push, Identify(protocols=(*relay.protocols(), "/new/1"), agent_version="js-libp2p/3.1.0")
            )
        await trio.sleep(1)
        info = a.host.info(relay.id)
        assert info is not None
        assert "/new/1" in info.protocols
        await around.meet(a, b)
        await trio.sleep(10)
        assert a.host.traffic().peers[b.host.id].way == b.host.traffic().peers[a.host.id].way == "punched"


async def test_a_pair_that_cannot_be_punched_rests_and_tries_again_when_an_address_is_new(
    autojump_clock: Clock,
) -> None:
    async with neighbourhood() as around:
        a, b = await relayed(around, "symmetric")
        await trio.sleep(20)
        dialed = dials(b)
        (why,) = b.punching.status().values()
        assert "no connection in 3 attempts" in why
        await trio.sleep(FIRST_PAUSE_S * 0.75 - 20)
        assert dialed == []
        await trio.sleep(FIRST_PAUSE_S)
        tried = len(dialed)
        assert tried > 0
        await trio.sleep(20)
        assert len(b.punching.status()) == 1
        dialed.clear()
        a.host.whereabouts.announce("the user", [tcp_addr("45.9.9.9", 4001)])
        await trio.sleep(15)
        assert tcp_addr("45.9.9.9", 4001) in dialed
        assert await ask(a.host, b.host, b"still relayed") == b"still relayed"


async def lie(stream: Stream) -> None:
    for _ in range(limits.PUNCH_ATTEMPTS):
        await receive_message(stream, limits.PUNCH_MESSAGE_BYTES)
        await say(stream, PunchKind.CONNECT, JUNK)
        await receive_message(stream, limits.PUNCH_MESSAGE_BYTES)


async def be_silent(stream: Stream) -> None:
    await stream.wait_gone()


@pytest.mark.parametrize(
    ("answer", "within_s", "reason"),
    [
        pytest.param(lie, 25, "no address that can be dialed", id="junk addresses"),
        pytest.param(be_silent, 15, "no answer within", id="no answer"),
    ],
)
async def test_a_hostile_answer_leads_to_no_dial_and_the_reason_is_told(
    autojump_clock: Clock, answer: Callable[[Stream], Awaitable[None]], within_s: float, reason: str
) -> None:
    async with neighbourhood() as around:
        a = await around.peer("a", "symmetric")
        b = await around.peer("b", "port-restricted")
        a.host.handle(DCUTR, answer)
        for peer in (a, b):
            await around.settle(peer)
        dialed = dials(b)
        await around.meet(a, b)
        await trio.sleep(within_s)
        assert dialed == []
        (why,) = b.punching.status().values()
        assert reason in why


async def test_who_proposes_over_a_direct_link_or_out_of_turn_is_sent_away(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    async with neighbourhood() as around:
        a, b = await relayed(around, "symmetric")
        await trio.sleep(1)
        relay = around.relay.host
        over_relay = a.host.links.best(b.host.id)
        assert over_relay is not None
        assert over_relay.way == PathKind.RELAYED
        with caplog.at_level(logging.WARNING, logger="peerd.reach"):
            direct = await a.host.open_stream(relay.id, DCUTR)
            await say(direct, PunchKind.CONNECT, [])
            with pytest.raises((Unreachable, RemoteError)):
                await receive_message(direct, 100)
            early = await over_relay.open(DCUTR)
            await say(early, PunchKind.SYNC, [])
            with pytest.raises((Unreachable, RemoteError)):
                await receive_message(early, 100)
        assert "without a relay" in caplog.text
        assert "SYNC arrived instead of CONNECT" in caplog.text


async def test_each_new_proposal_of_a_peer_ends_its_last_one(autojump_clock: Clock) -> None:
    async with neighbourhood() as around:
        a, b = await relayed(around, "symmetric")
        await trio.sleep(20)
        link = a.host.links.best(b.host.id)
        assert link is not None
        dialed = dials(b)
        streams = []
        for _ in range(20):
            streams.append(await link.open(DCUTR))
            await say(streams[-1], PunchKind.CONNECT, [tcp_addr("45.99.0.1", 4001)])
            await receive_message(streams[-1], limits.PUNCH_MESSAGE_BYTES)
            await say(streams[-1], PunchKind.SYNC, [])
            await trio.sleep(0.2)
        assert len(b.punching._served) == 1
        assert len([addr for addr in dialed if addr == tcp_addr("45.99.0.1", 4001)]) <= limits.PUNCH_TARGET_PER_MINUTE
        await trio.sleep(30)
        assert b.punching._served == {}
        assert b.host.punching == set()
