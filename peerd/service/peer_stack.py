"""A peer's protocol stack: its host, the calls over it, and the DHT over these, put together in their order.

What every peer stands on, be it a daemon, a simulated one, or one in a test. Roles and ways come on top; the daemon
keeps each part running by itself and does not use `run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio
from multiaddr import Multiaddr

from peerd.core.clock import Clock
from peerd.core.keys import Keypair
from peerd.net.host.host import Host, HostConfig
from peerd.net.link.sealing import Buffers
from peerd.net.transport import Transport
from peerd.service.dht.dht import Dht, DhtConfig
from peerd.service.rpc.rpc import Rpc


@dataclass(frozen=True, slots=True)
class PeerStack:
    """One peer's parts. Nothing moves until they run."""

    keypair: Keypair
    clock: Clock
    host: Host
    rpc: Rpc
    dht: Dht

    async def run(
        self,
        listen: Sequence[Multiaddr] = (),
        bootstrap: Sequence[Multiaddr] | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Listen, carry calls, and join the DHT through `bootstrap`, until cancelled; None: without the DHT."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.host.run, listen)
            await nursery.start(self.rpc.run)
            if bootstrap is not None:
                await nursery.start(self.dht.run, bootstrap)
            task_status.started()


def peer_stack(
    keypair: Keypair,
    clock: Clock,
    transports: Sequence[Transport],
    host_config: HostConfig | None = None,
    dht_config: DhtConfig | None = None,
    buffers: Buffers | None = None,
) -> PeerStack:
    """The stack of the peer with this identity. `buffers`: see `Host`."""
    host = Host(keypair, clock, transports, host_config, buffers)
    rpc = Rpc(host, clock)
    return PeerStack(keypair, clock, host, rpc, Dht(host, rpc, clock, keypair, dht_config))
