"""A peer's protocol stack: its host, remote calls over the host, and the DHT over remote calls.

Every peer has one: a daemon, a simulated peer, and a peer in a test. Roles and connectivity services are built on top.
The daemon runs each part in a task of its own and does not use `PeerStack.run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import trio
from multiaddr import Multiaddr

from peerd.core.clock import Clock
from peerd.core.keys import Keypair
from peerd.dht.dht import Dht, DhtConfig
from peerd.rpc.rpc import Rpc
from peerd.wire.host.host import Host, HostConfig
from peerd.wire.link.sealing import Buffers
from peerd.wire.transport import Transport


@dataclass(frozen=True, slots=True)
class PeerStack:
    """One peer's parts. Idle until `run`, or until each part runs."""

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
        """Listen, serve calls, and join the DHT through `bootstrap` (not at all if None), until cancelled."""
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
    """Build the stack of the peer with this identity. `buffers`: see `Host`."""
    host = Host(keypair, clock, transports, host_config, buffers)
    rpc = Rpc(host, clock)
    return PeerStack(keypair, clock, host, rpc, Dht(host, rpc, clock, keypair, dht_config))
