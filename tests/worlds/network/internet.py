"""Hosts in a simulated internet, each public or behind a router, with the parts that make ways."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from multiaddr import Multiaddr

from peerd.core.addr import parse_addr, tcp_addr, with_peer
from peerd.daemon.control.connectivity import Connectivity, ConnectivityConfig
from peerd.dht.dht import Dht
from peerd.reach.autonat import AutoNat
from peerd.rpc.rpc import Rpc
from tests.worlds.network.hosts import Hosts, keypair, running
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.nat import Internet, Kind, NatHome
from tests.worlds.simulation.simnet import SimLine

PORT = 4001


@dataclass
class Peers(Hosts):
    """Hosts in one simulated internet, by name."""

    ways: dict[str, Connectivity] = field(default_factory=dict)
    dhts: dict[str, Dht] = field(default_factory=dict)
    homes: dict[str, NatHome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._internet = Internet(self.net)

    async def judge(self, name: str, kind: Kind = "public") -> AutoNat:
        """A host that tests and is tested, and does nothing else."""
        host = await self.start(name, kind=kind)
        reach = AutoNat(host, SimClock(1, name))
        await self.nursery.start(reach.run)
        return reach

    async def join_swarm(
        self, name: str, kind: Kind = "public", *others: str, relay: bool = False, key: str = ""
    ) -> Connectivity:
        """A whole peer, with DHT and everything that makes ways, which joins through `others`."""
        host, clock = await self.start(name, kind=kind, key=key), SimClock(1, name)
        rpc = Rpc(host, clock)
        dht = self.dhts[name] = Dht(host, rpc, clock, keypair(key or name))
        config = ConnectivityConfig(relay=relay)
        ways = self.ways[name] = Connectivity(host, (rpc, dht), clock, keypair(key or name), config)
        await self.nursery.start(rpc.run)
        await self.nursery.start(ways.run)
        await self.nursery.start(dht.run, [self.addr(other) for other in others])
        return ways

    def machine(self, name: str, kind: Kind = "public", *, resets: bool = False) -> NatHome:  # type: ignore[override]
        """A machine behind such a router."""
        home = self.homes[name] = self._internet.home(name, kind, resets=resets, line=SimLine(latency_s=0.02))
        return home

    def listens(self, name: str) -> Multiaddr:
        return tcp_addr("0.0.0.0", PORT)

    def addr(self, name: str) -> Multiaddr:
        return with_peer(parse_addr(self.outside(name)), self.hosts[name].id)

    def outside(self, name: str) -> str:
        return f"/ip4/{self.homes[name].router.outside}/tcp/{PORT}"

    async def join(self, name: str, *others: str) -> None:
        for other in others:
            await self.hosts[name].connect_addr(self.addr(other))


def internet() -> AbstractAsyncContextManager[Peers]:
    return running(Peers)
