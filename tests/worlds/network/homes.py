"""Hosts at home behind simulated routers, with circuits and hole punching, around one public relay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from peerd.reach.hole_puncher import HolePuncher
from peerd.reach.relay.relay import Relay
from peerd.wire.host.host import HostConfig
from tests.worlds.network.circuits import Client, start_client
from tests.worlds.network.hosts import echo, keypair, running
from tests.worlds.network.internet import Peers
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.nat import Kind, NatHome


@dataclass
class Peer(Client):
    """One host and what makes its ways."""

    home: NatHome
    punching: HolePuncher


@dataclass
class Neighbourhood(Peers):
    """Peers by name, and the relay."""

    relay: Peer = field(init=False)

    async def peer(self, name: str, kind: Kind = "public", *, resets: bool = False, agent: str = "") -> Peer:
        config = HostConfig(agent=agent) if agent else None
        client = await start_client(self, name, config, kind=kind, resets=resets)
        client.host.handle("/echo/1", echo)
        punching = HolePuncher(client.host, SimClock(1, name))
        await self.nursery.start(punching.run)
        return Peer(client.host, client.circuits, client.scope, self.homes[name], punching)

    async def settle(self, peer: Peer) -> None:
        """Let the relay know `peer`, and take circuits for it."""
        await peer.settle(self.relay.host)
        await trio.sleep(1)

    async def meet(self, a: Peer, b: Peer) -> None:
        """`a` connects to `b` over the relay."""
        await a.host.connect(b.host.id, b.circuits.reservations[self.relay.host.id].addrs)


@asynccontextmanager
async def neighbourhood() -> AsyncIterator[Neighbourhood]:
    async with running(Neighbourhood) as found:
        found.relay = await found.peer("relay")
        await found.nursery.start(Relay(found.relay.host, SimClock(1, "r"), keypair("relay")).run)
        yield found
