"""Hosts at home behind simulated routers, with circuits and hole punching, around one public relay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from peerd.core.addr import tcp_addr
from peerd.net.host.host import Host, HostConfig
from peerd.net.relay.circuit_transport import Circuits
from peerd.service.connectivity.hole_puncher import HolePuncher
from peerd.service.connectivity.relay import Relay
from peerd.sim.clock import SimClock
from peerd.sim.nat import Internet, Kind, NatHome
from peerd.sim.simnet import SimLine
from tests.worlds.network.hosts import echo, keypair
from tests.worlds.network.virtual import running_net

PORT = 4001


@dataclass
class Peer:
    """One host and what makes its ways."""

    home: NatHome
    host: Host
    circuits: Circuits
    punching: HolePuncher


@dataclass
class Neighbourhood:
    """Peers by name, and the relay."""

    internet: Internet
    nursery: trio.Nursery
    relay: Peer = field(init=False)

    async def start(self, name: str, kind: Kind, *, resets: bool = False, agent: str = "") -> Peer:
        home = self.internet.home(name, kind, resets=resets, line=SimLine(latency_s=0.02))
        config = HostConfig(agent=agent) if agent else HostConfig()
        host = Host(keypair(name), SimClock(1, name), [home], config)
        host.handle("/echo/1", echo)
        peer = Peer(home, host, Circuits(host, SimClock(1, name)), HolePuncher(host, SimClock(1, name)))
        host.add_transport(peer.circuits)
        await self.nursery.start(host.run, [tcp_addr("0.0.0.0", PORT)])
        await self.nursery.start(peer.circuits.run)
        await self.nursery.start(peer.punching.run)
        return peer

    async def settle(self, peer: Peer) -> None:
        """Let the relay know `peer`, and take circuits for it."""
        relay = self.relay.host
        await peer.host.connect(relay.id, relay.listen_addrs())
        held = await peer.circuits.reserve(relay.id)
        peer.host.whereabouts.announce("relay", held.addrs)
        await trio.sleep(1)

    async def meet(self, a: Peer, b: Peer) -> None:
        """`a` connects to `b` over the relay."""
        await a.host.connect(b.host.id, b.circuits.reservations[self.relay.host.id].addrs)


@asynccontextmanager
async def neighbourhood() -> AsyncIterator[Neighbourhood]:
    with trio.fail_after(100_000):
        async with running_net() as net, trio.open_nursery() as nursery:
            found = Neighbourhood(Internet(net), nursery)
            found.relay = await found.start("relay", "public")
            await nursery.start(Relay(found.relay.host, SimClock(1, "r"), keypair("relay")).run)
            yield found
            nursery.cancel_scope.cancel()
