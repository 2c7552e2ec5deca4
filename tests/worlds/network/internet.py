"""Hosts in a simulated internet, each public or behind a router, with the parts that make ways."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio
from multiaddr import Multiaddr

from peerd.control.connectivity import Connectivity, ConnectivityConfig
from peerd.core.addr import parse_addr, tcp_addr, with_peer
from peerd.net.host.host import Host
from peerd.service.connectivity.autonat import AutoNat
from peerd.service.dht.dht import Dht
from peerd.service.rpc.rpc import Rpc
from peerd.sim.clock import SimClock
from peerd.sim.nat import Internet, Kind, NatHome, SimRouter
from peerd.sim.simnet import SimLine, SimNet
from tests.worlds.network.hosts import keypair
from tests.worlds.network.virtual import running_net

PORT = 4001


@dataclass
class Peers:
    """Hosts with their Reach in one simulated internet, by name."""

    net: SimNet
    nursery: trio.Nursery
    hosts: dict[str, Host] = field(default_factory=dict)
    ways: dict[str, Connectivity] = field(default_factory=dict)
    dhts: dict[str, Dht] = field(default_factory=dict)
    scopes: dict[str, trio.CancelScope] = field(default_factory=dict)
    routers: dict[str, SimRouter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._internet = Internet(self.net)

    async def start(self, name: str, kind: Kind = "public", *, tests: bool = True) -> AutoNat:
        """A host that tests and is tested, and does nothing else; without `tests` not even that."""
        host, clock = await self._host(name, kind)
        reach = AutoNat(host, clock)
        if tests:
            await self.nursery.start(reach.run)
        return reach

    async def join_swarm(
        self, name: str, kind: Kind = "public", *others: str, relay: bool = False, key: str | None = None
    ) -> Connectivity:
        """A whole peer, with DHT and everything that makes ways, which joins through `others`.

        `key`: whose key it has, if another's.
        """
        host, clock = await self._host(name, kind, key)
        rpc = Rpc(host, clock)
        dht = self.dhts[name] = Dht(host, rpc, clock, keypair(key or name))
        config = ConnectivityConfig(relay=relay)
        ways = self.ways[name] = Connectivity(host, (rpc, dht), clock, keypair(key or name), config)
        await self.nursery.start(rpc.run)
        await self.nursery.start(ways.run)
        await self.nursery.start(dht.run, [self.addr(other) for other in others])
        return ways

    def home(self, name: str, kind: Kind) -> NatHome:
        """A machine behind such a router, with nothing that runs on it yet."""
        home = self._internet.home(name, kind, line=SimLine(latency_s=0.02))
        self.routers[name] = home.router
        return home

    async def _host(self, name: str, kind: Kind, key: str | None = None) -> tuple[Host, SimClock]:
        home = self.home(name, kind)
        clock = SimClock(1, name)
        host = self.hosts[name] = Host(keypair(key or name), clock, [home])
        await self.nursery.start(self._run, name, host)
        return host, clock

    async def _run(self, name: str, host: Host, *, task_status: trio.TaskStatus[None]) -> None:
        with trio.CancelScope() as self.scopes[name]:
            await host.run([tcp_addr("0.0.0.0", PORT)], task_status=task_status)

    def stop(self, name: str) -> None:
        """The host leaves."""
        self.scopes[name].cancel()

    def addr(self, name: str) -> Multiaddr:
        return with_peer(parse_addr(self.outside(name)), self.hosts[name].id)

    def outside(self, name: str) -> str:
        return f"/ip4/{self.routers[name].outside}/tcp/{PORT}"

    async def join(self, name: str, *others: str) -> None:
        for other in others:
            await self.hosts[name].connect_addr(self.addr(other))


@asynccontextmanager
async def internet() -> AsyncIterator[Peers]:
    with trio.fail_after(10_000):
        async with running_net() as net, trio.open_nursery() as nursery:
            yield Peers(net, nursery)
            nursery.cancel_scope.cancel()
