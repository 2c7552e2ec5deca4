"""Peers of a run with experts under virtual time: each with a stack, a vault, and a host of made-up experts."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from peerd.core.experts.grid import Uid, bitmap, grid_of, prefix_key
from peerd.core.messages.encoding import encode
from peerd.core.messages.experts import Announced, Name, Pointer, state_root
from peerd.core.run.runfile import ExpertsSection, RunFile, fingerprint
from peerd.service.experts.vault import Vault
from peerd.service.experts.vault_disk import VaultDisk, digests_of
from peerd.service.peer_stack import PeerStack, peer_stack
from peerd.sim.clock import SimClock
from peerd.sim.simnet import SimNet
from tests.kit.hosts import keypair
from tests.kit.virtual import addr_of, running_net, transport
from tests.kit.workers import InlineWorker

MIB = 1 << 20
ANNOUNCE_S = 10.0


def expert_run(**section: Any) -> RunFile:
    return RunFile(
        run="moe", experts=ExpertsSection(**{"layers": 1, "grid": [4, 4], "announce_s": ANNOUNCE_S} | section)
    )


def state(seed: int, size: int = 2 * MIB + 100) -> bytes:
    """Bytes of a made-up checkpoint."""
    return hashlib.shake_128(f"state {seed}".encode()).digest(size)


def pointer_to(data: bytes, owner: str, run: RunFile, uid: Uid, **facts: Any) -> Pointer:
    """The signed pointer of peer `owner`."""
    keys = keypair(owner)
    told = {"generation": 0, "version": 1, "digest": state_root(digests_of(data)), "size_bytes": len(data)} | facts
    return Pointer(run=fingerprint(run), expert=Name.of(uid), owner=keys.peer_id.public_key, **told).signed(keys)


@dataclass
class ExpertPeer:
    """One peer; `stop` is a crash."""

    name: str
    stack: PeerStack
    vault: Vault
    folder: Path
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    tasks: list[Callable[..., Any]] = field(default_factory=list)

    @property
    def id(self) -> Any:
        return self.stack.host.id

    async def run(self, addr: Any, bootstrap: list[Any], *, task_status: trio.TaskStatus[None]) -> None:
        with self.scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(self.stack.run, [addr], bootstrap)
                await self.vault.open()
                await nursery.start(self.vault.run)
                for task in self.tasks:
                    await nursery.start(task)
                task_status.started()

    def stop(self) -> None:
        self.scope.cancel()


@dataclass
class ExpertSwarm:
    """Peers by name; all join through the first."""

    run: RunFile
    root: Path
    net: SimNet
    nursery: trio.Nursery
    peers: dict[str, ExpertPeer] = field(default_factory=dict)

    def make(self, name: str, most_bytes: int = 64 * MIB, **line: Any) -> ExpertPeer:
        stack = peer_stack(keypair(name), SimClock(1, name), [transport(self.net, name, **line)])
        folder = self.root / name
        vault = Vault(self.run, stack, VaultDisk(folder), InlineWorker(), most_bytes)
        peer = self.peers[name] = ExpertPeer(name, stack, vault, folder)
        return peer

    async def begin(self, peer: ExpertPeer) -> ExpertPeer:
        first = next(iter(self.peers.values()))
        bootstrap = [] if first is peer else first.stack.host.addrs()
        await self.nursery.start(peer.run, addr_of(self.net, peer.name), bootstrap)
        for other in self.peers.values():  # as records tell them
            for one, of in ((peer, other), (other, peer)):
                one.stack.host.learn(of.id, of.stack.host.addrs())
        return peer

    async def start(self, *names: str, most_bytes: int = 64 * MIB) -> list[ExpertPeer]:
        return [await self.begin(self.make(name, most_bytes)) for name in names]

    async def claim(self, peer: ExpertPeer, uid: Uid, generation: int = 0, version: int = 0) -> None:
        """Announce one expert, as its host does every period."""
        side = grid_of(self.run).sides[-1]
        addrs = [str(addr) for addr in peer.stack.host.addrs()]
        announced = Announced(Name.of(uid.prefix), bitmap([uid.at[-1]], side), [generation], [version], 0.0, addrs)
        await peer.stack.dht.put(prefix_key(self.run.run, uid.prefix), encode(announced), ttl_s=60.0)


@asynccontextmanager
async def expert_swarm(root: Path, run: RunFile | None = None) -> AsyncIterator[ExpertSwarm]:
    with trio.fail_after(100_000):
        async with running_net() as net, trio.open_nursery() as nursery:
            yield ExpertSwarm(run or expert_run(), root, net, nursery)
            nursery.cancel_scope.cancel()
