"""Keeping a port open at the router, on the virtual clock, with routers that do as the test says."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from peerd.core.addr import tcp_addr
from peerd.reach.gateway.router import Mapped, NoMapping
from peerd.reach.port_mapping import PortMapConfig, PortMapping
from peerd.wire.host.host import Host
from tests.worlds.network.hosts import running_hosts

PUBLIC = tcp_addr("9.8.7.6", 4001)
CONFIG = PortMapConfig()


class FakeRouter:
    """`ip`: its address, "" when it does not map. Notes when it was asked to map, and what is mapped."""

    def __init__(self, kind: str, ip: str, *, lease_s: int = 3600, slow_s: float = 0.0) -> None:
        self.kind, self.ip, self.lease_s, self.slow_s = kind, ip, lease_s, slow_s
        self.asked_at: list[float] = []
        self.ports: set[int] = set()

    async def map(self, port: int, lease_s: int) -> Mapped:
        self.asked_at.append(trio.current_time())
        await trio.sleep(self.slow_s)
        if not self.ip:
            raise NoMapping(f"no {self.kind} here")
        self.ports.add(port)
        return Mapped(ipaddress.ip_address(self.ip), port, self.lease_s)

    async def unmap(self, port: int) -> None:
        await trio.sleep(self.slow_s)
        self.ports.discard(port)

    def pauses_s(self) -> list[float]:
        return [round(b - a) for a, b in zip(self.asked_at, self.asked_at[1:], strict=False)]


@asynccontextmanager
async def mapping(*routers: FakeRouter) -> AsyncIterator[tuple[Host, PortMapping]]:
    """A host at a private address that asks these routers."""
    async with running_hosts() as hosts:
        host = await hosts.start("a")
        host.listen_addrs = lambda: [tcp_addr("192.168.1.5", 4001)]  # type: ignore[method-assign]
        ports = PortMapping(host, routers, CONFIG)
        async with trio.open_nursery() as nursery:
            await nursery.start(ports.run)
            yield host, ports
            nursery.cancel_scope.cancel()


def announced(host: Host) -> list[Multiaddr]:
    return [addr for addrs in host.whereabouts._announced.values() for addr in addrs]


async def test_the_first_router_that_maps_is_renewed_and_told_when_we_leave(
    autojump_clock: trio.testing.MockClock,
) -> None:
    none, good = FakeRouter("NAT-PMP", ""), FakeRouter("UPnP", "9.8.7.6", slow_s=1.0)
    async with mapping(none, good) as (host, ports):
        await trio.sleep(1000)
        assert announced(host) == [PUBLIC]
        assert ports.status() == {"state": "mapped", "address": str(PUBLIC), "by": "UPnP", "why": None}
        assert good.ports == {4001}
        assert good.pauses_s() == [301, 301, 301]
        assert len(none.asked_at) == 1
    assert good.ports == set()


async def test_a_short_lease_is_renewed_in_its_middle(autojump_clock: trio.testing.MockClock) -> None:
    good = FakeRouter("NAT-PMP", "9.8.7.6", lease_s=120)
    async with mapping(good):
        await trio.sleep(200)
    assert good.pauses_s() == [60, 60, 60]


async def test_a_router_behind_another_one_promises_nothing_worth_telling(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with mapping(FakeRouter("UPnP", "100.64.3.2")) as (host, ports):
        await trio.sleep(1)
        assert announced(host) == []
        assert ports.status()["state"] == "useless"
        assert "100.64.3.2, is not public" in ports.status()["why"]


@pytest.mark.parametrize(
    ("ip", "words"),
    [
        ("9.8.7.6", "the router forwards /ip4/9.8.7.6/tcp/"),
        ("192.168.7.7", "others cannot reach: the router's own address, 192.168.7.7, is not public (NAT-PMP)"),
        ("", "no router opens a port for this peer: no NAT-PMP here"),
    ],
    ids=["mapped", "useless", "none"],
)
async def test_the_log_says_what_came_of_it(
    ip: str, words: str, autojump_clock: trio.testing.MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "peerd.portmap"):
        async with mapping(FakeRouter("NAT-PMP", ip)):
            await trio.sleep(10)
    assert words in caplog.text
    told = [record.levelno for record in caplog.records if words in record.getMessage()]
    assert told == [logging.INFO if ip == "9.8.7.6" else logging.DEBUG], "only what changes something is for the screen"


async def test_where_nobody_maps_it_asks_ever_more_rarely_and_says_why(autojump_clock: trio.testing.MockClock) -> None:
    none, slow = FakeRouter("NAT-PMP", ""), FakeRouter("UPnP", "", slow_s=1e9)
    async with mapping(none, slow) as (host, ports):
        await trio.sleep(600)
        assert ports.status()["why"] == "no NAT-PMP here; UPnP: no answer within 15 s"
        assert announced(host) == []
    assert none.pauses_s() == [75, 135, 255]


async def test_a_mapping_that_is_lost_is_withdrawn(autojump_clock: trio.testing.MockClock) -> None:
    router = FakeRouter("NAT-PMP", "9.8.7.6")
    async with mapping(router) as (host, ports):
        await trio.sleep(10)
        router.ip = ""
        await trio.sleep(CONFIG.renew_s)
        assert announced(host) == []
        assert ports.status()["state"] == "none"


async def test_a_host_that_moves_asks_the_new_router_at_once(autojump_clock: trio.testing.MockClock) -> None:
    router = FakeRouter("NAT-PMP", "")
    async with mapping(router) as (host, _):
        await trio.sleep(10)
        router.ip = "9.8.7.6"
        host.whereabouts._relocations.unpark_all()
        await trio.sleep(1)
        assert announced(host) == [PUBLIC]


@pytest.mark.parametrize("listens", [[], ["9.9.9.9", "192.168.1.5"], ["127.0.0.1"]])
async def test_a_host_that_is_public_or_local_asks_nobody(
    autojump_clock: trio.testing.MockClock, listens: list[str]
) -> None:
    router = FakeRouter("NAT-PMP", "9.8.7.6")
    async with running_hosts() as hosts:
        host = await hosts.start("a")
        host.listen_addrs = lambda: [tcp_addr(ip, 4001) for ip in listens]  # type: ignore[method-assign]
        ports = PortMapping(host, [router], CONFIG)
        async with trio.open_nursery() as nursery:
            await nursery.start(ports.run)
            await trio.sleep(1000)
            nursery.cancel_scope.cancel()
    assert router.asked_at == []
    assert ports.status()["state"] == "not needed"


async def test_leaving_does_not_wait_for_a_router_that_hangs(autojump_clock: trio.testing.MockClock) -> None:
    router = FakeRouter("UPnP", "9.8.7.6")
    async with mapping(router):
        await trio.sleep(1)
        router.slow_s = 1e9
        begin = trio.current_time()
    assert trio.current_time() - begin <= CONFIG.leave_s + 3  # with the hosts' own goodbye
