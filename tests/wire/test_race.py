"""Dials on the virtual clock: which attempts run beside each other, and who is waited for."""

from __future__ import annotations

import math
import socket
from typing import Any

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from peerd.core.addr import TcpPlace, parse_addr, tcp_addr
from peerd.core.errors import Unreachable
from peerd.wire.happy_eyeballs import HEAD_START_S, PARALLEL, STAGGER_S
from peerd.wire.host.dialer import AddressBook, Dialer
from peerd.wire.tcp import resolve
from tests.worlds.network.hosts import keypair

PEER, RELAY = keypair("peer").peer_id, keypair("relay").peer_id
FOUR, SIX, NEAR = (tcp_addr(ip, 4001) for ip in ("8.8.8.8", "2600::8", "192.168.1.5"))
RELAYED = parse_addr(f"/ip4/9.9.9.9/tcp/4001/p2p/{RELAY}/p2p-circuit")


class Ways:
    """The outcome of each address after so many seconds: a link or, below zero, a refusal; unknown ones are silent."""

    def __init__(self) -> None:
        self.answers: dict[Multiaddr, float] = {}
        self.started: list[tuple[Multiaddr, float]] = []
        self.landed: list[Multiaddr] = []
        self.most = self._now = 0
        self.begin = trio.current_time()

    async def attempt(self, addr: Multiaddr, peer: object = None) -> None:
        self.started.append((addr, round(trio.current_time() - self.begin, 6)))
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            after_s = self.answers.get(addr, math.inf)
            await trio.sleep(abs(after_s))
            if after_s < 0:
                raise Unreachable("refused")
            self.landed.append(addr)
        finally:
            self._now -= 1


async def dial(ways: Ways, addrs: list[Multiaddr], book: AddressBook | None = None) -> float:
    """Seconds until there is a link."""
    book = book or AddressBook()
    book.learn(PEER, addrs)
    dialer, begin, took_s = Dialer(book, ways.attempt), trio.current_time(), list[float]()
    async with trio.open_nursery() as nursery:
        await dialer.reach(PEER, nursery)
        took_s.append(trio.current_time() - begin)
    return took_s[0]


async def test_a_dead_ipv6_address_costs_one_step(autojump_clock: trio.testing.MockClock) -> None:
    ways = Ways()
    ways.answers = {FOUR: 0.1}
    assert await dial(ways, [FOUR, SIX]) == pytest.approx(STAGGER_S + 0.1)
    assert ways.started == [(SIX, 0), (FOUR, STAGGER_S)]


async def test_a_relay_is_used_when_direct_ways_are_silent_and_those_under_way_may_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ways = Ways()
    ways.answers = {SIX: 3.0, RELAYED: 0.2}
    assert await dial(ways, [RELAYED, SIX]) == pytest.approx(HEAD_START_S + 0.2)
    assert ways.landed == [RELAYED, SIX]  # the block ended after both


async def test_a_direct_link_ends_every_other_attempt(autojump_clock: trio.testing.MockClock) -> None:
    ways = Ways()
    ways.answers = {SIX: 0.9, RELAYED: 5.0, FOUR: 5.0}
    assert await dial(ways, [RELAYED, SIX, FOUR]) == pytest.approx(0.9)
    assert trio.current_time() - ways.begin == pytest.approx(0.9)
    assert ways.landed == [SIX]


async def test_what_failed_is_not_waited_for_the_next_time(autojump_clock: trio.testing.MockClock) -> None:
    ways, book = Ways(), AddressBook()
    ways.answers = {SIX: -2.0, RELAYED: 0.2}
    await dial(ways, [RELAYED, SIX], book)
    assert await dial(ways, [], book) == pytest.approx(0.2)
    book.forget_failures()
    assert await dial(ways, [], book) == pytest.approx(HEAD_START_S + 0.2)


async def test_sixteen_silent_addresses_are_never_dialed_all_at_once(autojump_clock: trio.testing.MockClock) -> None:
    ways = Ways()
    addrs = [tcp_addr("8.8.8.8", port) for port in range(1, 17)]
    ways.answers = {addrs[0]: -15.0, addrs[15]: 0.1}
    took_s = await dial(ways, addrs)
    assert ways.most == PARALLEL
    assert took_s < 10


async def test_an_address_learned_while_all_others_are_silent_is_tried_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ways, book = Ways(), AddressBook()
    ways.answers = {SIX: 0.1}
    book.learn(PEER, [FOUR])
    dialer = Dialer(book, ways.attempt)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dialer.reach, PEER, nursery)
        await trio.sleep(2.0)
        dialer.learn(PEER, [SIX])
    assert ways.started == [(FOUR, 0), (SIX, 2.0)]
    assert trio.current_time() - ways.begin == pytest.approx(2.1)


Answers = dict[int, tuple[float, list[str]]]


class Resolver(trio.abc.HostnameResolver):
    """Answers per address family: seconds, then addresses."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def getaddrinfo(
        self, host: Any, port: Any, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> Any:
        after_s, hosts = self._answers[family]
        await trio.sleep(after_s)
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "No address")
        return [(family, type, 6, "", (text, port)) for text in hosts]

    async def getnameinfo(self, sockaddr: Any, flags: int) -> Any:
        raise NotImplementedError


class Pipe:
    """A link that only notes that it was closed."""

    def __init__(self, addr: Multiaddr) -> None:
        self.remote, self.closed = addr, False

    async def aclose(self) -> None:
        self.closed = True


async def connect(ways: Ways, answers: Answers, family: str = "dns") -> Multiaddr:
    trio.socket.set_custom_hostname_resolver(Resolver(answers))  # of this trio run

    async def one(addr: Multiaddr) -> Any:
        await ways.attempt(addr)
        return Pipe(addr)

    return (await resolve.connect_by_name(TcpPlace(family, "a.example.org", 4001), one)).remote


async def test_both_families_of_a_name_race(autojump_clock: trio.testing.MockClock) -> None:
    answers: Answers = {socket.AF_INET6: (0.02, ["2600::8"]), socket.AF_INET: (0.0, ["8.8.8.8"])}
    ways = Ways()
    ways.answers = {FOUR: 0.1}
    assert await connect(ways, answers) == FOUR
    assert ways.started == [(SIX, 0.02), (FOUR, 0.02 + STAGGER_S)]


async def test_a_name_server_that_is_slow_about_ipv6_delays_ipv4_by_a_moment(
    autojump_clock: trio.testing.MockClock,
) -> None:
    answers: Answers = {socket.AF_INET6: (5.0, ["2600::8"]), socket.AF_INET: (0.0, ["8.8.8.8"])}
    ways = Ways()
    ways.answers = {FOUR: 0.1}
    assert await connect(ways, answers) == FOUR
    assert ways.started == [(FOUR, resolve.RESOLUTION_DELAY_S)]
    assert trio.current_time() - ways.begin == pytest.approx(0.15)


async def test_a_name_that_leads_nowhere_tells_what_each_address_said(autojump_clock: trio.testing.MockClock) -> None:
    answers: Answers = {socket.AF_INET6: (0.5, ["2600::8"]), socket.AF_INET: (0.0, ["8.8.8.8"])}
    ways = Ways()
    ways.answers = {FOUR: -0.1, SIX: -0.1}
    with pytest.raises(Unreachable, match=r"8\.8\.8\.8/tcp/4001: refused; .*2600::8/tcp/4001: refused"):
        await connect(ways, answers)
    answers = {socket.AF_INET6: (0.0, []), socket.AF_INET: (0.0, [])}
    with pytest.raises(Unreachable, match=r"the name a.example.org cannot be resolved: no address"):
        await connect(ways, answers)


async def test_a_name_of_one_family_is_looked_up_in_that_one_only(autojump_clock: trio.testing.MockClock) -> None:
    answers: Answers = {socket.AF_INET: (0.0, ["8.8.8.8"])}
    ways = Ways()
    ways.answers = {FOUR: 0.0}
    assert await connect(ways, answers, "dns4") == FOUR
