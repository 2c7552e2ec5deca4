"""A relay and peers that use it, as real hosts on a simulated network."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import trio

from peerd.reach.relay.circuit_transport import Circuits
from peerd.reach.relay.relay import Relay
from peerd.reach.relay.relay_limits import RelayConfig
from peerd.wire.host.host import Host, HostConfig
from tests.worlds.network.hosts import Hosts, keypair, running_hosts
from tests.worlds.simulation.clock import SimClock


@dataclass
class Client:
    """A host that speaks circuits."""

    host: Host
    circuits: Circuits
    scope: trio.CancelScope

    async def settle(self, relay: Host) -> None:
        """Take a reservation at `relay`, and tell others of it."""
        await self.host.connect(relay.id, relay.listen_addrs())
        held = await self.circuits.reserve(relay.id)
        self.host.whereabouts.announce("relay", held.addrs)


async def start_relay(hosts: Hosts, name: str, config: RelayConfig | None = None, **line: float) -> tuple[Host, Relay]:
    """A host that serves as a relay."""
    host = await hosts.start(name, **line)
    relay = Relay(host, SimClock(1, f"{name}/relay"), keypair(name), config)
    await hosts.nursery.start(relay.run)
    return host, relay


async def start_client(hosts: Hosts, name: str, config: HostConfig | None = None, **place: Any) -> Client:
    """A host that can dial and take circuits."""
    host = await hosts.start(name, config, **place)
    circuits = Circuits(host, SimClock(1, f"{name}/circuits"))
    host.add_transport(circuits)
    client = Client(host, circuits, trio.CancelScope())

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        with client.scope:
            await circuits.run(task_status=task_status)

    await hosts.nursery.start(run)
    return client


async def behind(hosts: Hosts, name: str, relay: Host, **line: float) -> Client:
    """A peer that holds a reservation at `relay`; its own address is known to nobody."""
    client = await start_client(hosts, name, **line)
    await client.settle(relay)
    return client


@asynccontextmanager
async def relayed(
    config: RelayConfig | None = None, **line: float
) -> AsyncIterator[tuple[Hosts, Host, Relay, Client, Client]]:
    """All hosts, a relay and its service, a client `a` that knows nobody, and a client `b` behind the relay."""
    async with running_hosts() as hosts:
        relay, service = await start_relay(hosts, "r", config, **line)
        b = await behind(hosts, "b", relay, **line)
        yield hosts, relay, service, await start_client(hosts, "a", **line), b
