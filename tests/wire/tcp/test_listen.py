"""Listening addresses of a host, their announcement, and the detection of a machine that has moved."""

from __future__ import annotations

import errno
import socket
from collections import namedtuple

import psutil
import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from peerd.core.addr import parse_addr, tcp_addr, tcp_place
from peerd.core.errors import ConfigError
from peerd.wire.tcp import interfaces
from peerd.wire.tcp.interfaces import NetworkPlace, here
from peerd.wire.tcp.listen import open_listeners
from peerd.wire.tcp.tcp_transport import TcpTransport
from peerd.wire.transport import Listener, NoSuchFamily, RawLink
from tests.worlds.network.hosts import running_hosts

FOUR, SIX = parse_addr("/ip4/0.0.0.0/tcp/0"), parse_addr("/ip6/::/tcp/0")
Entry = namedtuple("Entry", "family address netmask")
State = namedtuple("State", "isup")


class Ports:
    """A transport of listening places only: who has which port."""

    def __init__(self, *, taken: set[tuple[str, int]] | None = None, missing: str = "") -> None:
        self.taken, self.missing = set(taken or ()), missing
        self.next_port = 5000

    def can_dial(self, addr: Multiaddr) -> bool:
        return True

    async def dial(self, addr: Multiaddr, *, fresh: bool = False) -> RawLink:
        raise NotImplementedError

    async def listen(self, addr: Multiaddr) -> Listener:
        place = tcp_place(addr)
        assert place is not None
        if place.family == self.missing:
            raise NoSuchFamily(f"cannot listen on {addr}: no such family")
        port = place.port
        if port == 0:
            self.next_port += 1
            port = self.next_port
        if (place.family, port) in self.taken:
            raise ConfigError(f"cannot listen on {addr}: address already in use")
        self.taken.add((place.family, port))
        return Held(self, tcp_addr(place.host, port), (place.family, port))


class Held:
    def __init__(self, ports: Ports, addr: Multiaddr, key: tuple[str, int]) -> None:
        self.addrs, self._ports, self._key = [addr], ports, key

    async def accept(self) -> RawLink:
        raise NotImplementedError

    async def aclose(self) -> None:
        self._ports.taken.discard(self._key)


async def opened(ports: Ports, *listen: str) -> list[str]:
    return [str(each.addrs[0]) for each in await open_listeners([parse_addr(text) for text in listen], [ports])]


async def test_both_wildcards_get_one_port_though_the_first_choice_is_taken_in_one_family() -> None:
    ports = Ports(taken={("ip6", 5001), ("ip6", 5002)})
    assert await opened(ports, str(FOUR), str(SIX)) == ["/ip4/0.0.0.0/tcp/5003", "/ip6/::/tcp/5003"]
    assert ("ip4", 5001) not in ports.taken  # given back


@pytest.mark.parametrize(("missing", "left"), [("ip6", "/ip4/0.0.0.0/tcp/7"), ("ip4", "/ip6/::/tcp/7")])
async def test_a_machine_with_one_kind_of_address_listens_on_that_one(missing: str, left: str) -> None:
    assert await opened(Ports(missing=missing), "/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7") == [left]


async def test_an_address_that_was_asked_for_alone_or_is_taken_fails_and_leaves_nothing_open() -> None:
    with pytest.raises(ConfigError, match="/ip6/::/tcp/7: no such family"):
        await opened(Ports(missing="ip6"), "/ip6/::/tcp/7")
    ports = Ports(taken={("ip6", 7)})
    with pytest.raises(ConfigError, match="/ip6/::/tcp/7: address already in use"):
        await opened(ports, "/ip4/0.0.0.0/tcp/8", "/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7")
    assert ports.taken == {("ip6", 7)}


@pytest.mark.socket
async def test_a_system_without_ipv6_says_so_in_the_transports_words(monkeypatch: pytest.MonkeyPatch) -> None:
    real = trio.socket.socket

    def no_ipv6(family: int, *rest: int) -> object:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *rest)

    monkeypatch.setattr(trio.socket, "socket", no_ipv6)
    with pytest.raises(NoSuchFamily, match="address family not supported"):
        await TcpTransport().listen(SIX)
    (only,) = await open_listeners([FOUR, SIX], [TcpTransport()])
    assert all(str(addr).startswith("/ip4/") for addr in only.addrs)
    await only.aclose()


@pytest.mark.socket
async def test_real_sockets_share_one_port_of_both_families_where_there_are_both() -> None:
    listeners = await open_listeners([FOUR, SIX], [TcpTransport()])
    places = [place for each in listeners for addr in each.addrs if (place := tcp_place(addr)) is not None]
    assert len({place.port for place in places}) == 1
    for each in listeners:
        await each.aclose()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Interfaces by name: addresses with their number of network bits; change it as you like."""
    state = {"lo": ["127.0.0.1/8", "::1/128"], "wifi": ["192.168.1.5/24"]}

    def entries() -> dict[str, list[Entry]]:
        return {name: [_entry(text) for text in texts] for name, texts in state.items()}

    monkeypatch.setattr(psutil, "net_if_addrs", entries)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: State(name != "down") for name in state})
    monkeypatch.setattr(interfaces, "_route_address", lambda version: None)
    return state


def _entry(text: str) -> Entry:
    host, _, bits = text.partition("/")
    if ":" in host:
        mask = interfaces.ipaddress.IPv6Network(f"::/{bits}").netmask
        return Entry(socket.AF_INET6, host, str(mask))
    return Entry(socket.AF_INET, host, str(interfaces.ipaddress.IPv4Network(f"0.0.0.0/{bits}").netmask))


def test_addresses_worth_telling_leave_out_link_local_ones_idle_interfaces_and_bridges_of_containers(
    machine: dict[str, list[str]],
) -> None:
    machine.update(
        wired=["10.1.2.3/16", "fe80::1%wired/64", "2600::5/64", "fd00::5/64"],
        docker0=["172.17.0.1/16"],
        down=["10.9.9.9/8"],
    )
    place = here()
    assert place.hosts(4) == ["192.168.1.5", "10.1.2.3", "127.0.0.1"]
    assert place.hosts(6) == ["2600::5", "fd00::5", "::1"]
    assert [str(net) for net in place.networks()] == ["2600::/64", "192.168.1.0/24", "10.1.0.0/16", "fd00::/64"]


def test_the_address_of_the_default_route_comes_first(
    machine: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine["a-vpn"], machine["br-wan"] = ["10.1.2.3/16"], ["192.168.7.1/24"]
    monkeypatch.setattr(interfaces, "_route_address", lambda version: interfaces.ipaddress.ip_address("192.168.7.1"))
    assert here().hosts(4) == ["192.168.7.1", "10.1.2.3", "192.168.1.5", "127.0.0.1"]


def test_a_machine_with_very_many_addresses_names_a_few(machine: dict[str, list[str]]) -> None:
    machine["wired"] = [f"10.0.{number}.1/24" for number in range(200)]
    assert len(here().hosts(4)) == interfaces.OWN_ADDRS + 1


@pytest.mark.socket
async def test_a_listener_names_the_machines_new_addresses_within_seconds(
    autojump_clock: trio.testing.MockClock, machine: dict[str, list[str]]
) -> None:
    tcp = TcpTransport()
    listener = await tcp.listen(FOUR)
    begin, seen = trio.current_time(), []

    async def follow() -> None:
        while True:
            await tcp.relocated()
            seen.append((trio.current_time() - begin, str(listener.addrs[0]).partition("/tcp")[0]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await trio.sleep(60)
        machine["wifi"] = ["10.0.0.7/24"]
        await trio.sleep(60)
        machine["wifi"] = []
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert [host for _, host in seen] == ["/ip4/10.0.0.7", "/ip4/127.0.0.1"]
    assert all(at_s % 60 <= 3 for at_s, _ in seen)
    await listener.aclose()


async def test_a_host_that_moves_tells_its_peers(autojump_clock: trio.testing.MockClock) -> None:
    async with running_hosts() as hosts:
        a, b = await hosts.start("a"), await hosts.start("b")
        moving = Moving(a.listen_addrs()[0])
        a.add_transport(moving)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(a.whereabouts.follow, lambda: None)
            await b.connect(a.id, [hosts.addr("a")])
            await trio.sleep(1)
            moving.addr = tcp_addr("9.9.9.9", 4001)
            a.whereabouts.announce("test", [moving.addr])
            moving.happened.set()
            with trio.fail_after(3):
                await a.whereabouts.relocated()
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        info = b.info(a.id)
        assert info is not None
        assert moving.addr in info.addrs


class Moving(Ports):
    """A transport whose machine moves when the test says so."""

    def __init__(self, addr: Multiaddr) -> None:
        super().__init__()
        self.addr = addr
        self.happened = trio.Event()

    def networks(self) -> tuple[()]:
        return ()

    async def relocated(self) -> None:
        await self.happened.wait()
        self.happened = trio.Event()


def test_a_place_without_interfaces_names_nothing() -> None:
    assert NetworkPlace().hosts(4) == []
