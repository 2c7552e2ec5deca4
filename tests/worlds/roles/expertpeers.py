"""Peers of a run with experts under virtual time: each with a stack, a vault, and a host of made-up experts."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import trio

from peerd.experts.calls.vault import Vault
from peerd.experts.calls.vault_disk import VaultDisk, digests_of
from peerd.experts.hosting.adoption import Adoption
from peerd.experts.hosting.checkpoints import ExpertCheckpoints
from peerd.experts.hosting.sharing import ExpertStateSharing
from peerd.experts.rules.host_share import HostShare
from peerd.log import EventLog
from peerd.messages.encoding import encode
from peerd.messages.experts import Announced, CheckpointRef, Name, state_root
from peerd.role.peer_stack import PeerStack, peer_stack
from peerd.run.grid import Uid, bitmap, grid_of, prefix_key
from peerd.run.runfile import RunFile, fingerprint
from tests.kit.expert_runs import expert_run
from tests.worlds.machines.fake_experts import FakeExpert, FakeHosted
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.network.hosts import keypair
from tests.worlds.network.virtual import addr_of, running_net, transport
from tests.worlds.roles.contexts import role_context
from tests.worlds.simulation.clock import SimClock, run_virtual
from tests.worlds.simulation.memory import MemoryTransport
from tests.worlds.simulation.simnet import SimNet

T = TypeVar("T")

MIB = 1 << 20
ANNOUNCE_S = 10.0
STATE_BYTES = 2 * MIB  # the most that a state of a made-up expert takes


def state(seed: int, size: int = 2 * MIB + 100) -> bytes:
    """Bytes of a made-up checkpoint."""
    return hashlib.shake_128(f"state {seed}".encode()).digest(size)


def pointer_to(data: bytes, owner: str, run: RunFile, uid: Uid, **facts: Any) -> CheckpointRef:
    """The signed pointer of peer `owner`."""
    keys = keypair(owner)
    told = {"generation": 0, "version": 1, "digest": state_root(digests_of(data)), "size_bytes": len(data)} | facts
    return CheckpointRef(run=fingerprint(run), expert=Name.of(uid), owner=keys.peer_id.public_key, **told).signed(keys)


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


class MadeUpHost:
    """The host of experts on one peer, with the two that keep and adopt them."""

    def __init__(self, swarm: ExpertSwarm, peer: ExpertPeer, places: int, *, shares: bool = False) -> None:
        self.swarm, self.peer, self.places = swarm, peer, places
        self.experts: dict[Uid, FakeHosted] = {}
        self.dropped: dict[Uid, str] = {}
        self.adopted_at: dict[Uid, float] = {}
        self.log = EventLog(peer.stack.clock)
        self._telling = trio.Lock()
        self.ctx = ctx = role_context(peer.stack, swarm.run, peer.folder, lambda _: InlineWorker(), self.log)
        self.checkpoints = ExpertCheckpoints(ctx, peer.vault, self)
        self.adoption = Adoption(ctx, peer.vault, self, self.checkpoints, state_bytes=STATE_BYTES)
        peer.tasks += [self.announce_all, self.checkpoints.run, self.adoption.run]
        self.held: set[Uid] = set()  # of which no updates are made
        self.sample_s = 0.0
        if shares:
            self.sharing = ExpertStateSharing(ctx, peer.vault, self, self.checkpoints, state_bytes=STATE_BYTES)
            peer.tasks.append(self.sharing.run)

    def begin(self, uid: Uid, seed: str = "anew", generation: int = 0) -> FakeExpert:
        """Host an expert from the start."""
        model = FakeExpert(uid, seed=seed)
        self.experts[uid] = FakeHosted(model, generation)
        return model

    async def adopt(self, uid: Uid, generation: int, state: bytes | bytearray | None) -> None:
        model = FakeExpert(uid)
        if state is not None:
            model.load(state)
        self.experts[uid] = FakeHosted(model, generation)
        self.adopted_at[uid] = trio.current_time()

    async def tell(self, uid: Uid) -> None:
        await self.announce(uid)

    async def drop(self, uid: Uid, why: str) -> None:
        del self.experts[uid]
        self.dropped[uid] = why
        if any(other.prefix == uid.prefix for other in self.experts):
            await self.announce(uid)
        else:
            await self.peer.stack.dht.withdraw(prefix_key(self.swarm.run.run, uid.prefix))

    def room(self) -> int:
        return self.places - len(self.experts)

    def share(self) -> HostShare:
        return HostShare(len(self.experts), self.room() - len(self.peer.vault.taking), self.sample_s)

    async def hold(self, uid: Uid) -> None:
        await trio.lowlevel.checkpoint()
        self.held.add(uid)

    def release(self, uid: Uid) -> None:
        self.held.discard(uid)

    async def announce(self, uid: Uid) -> None:
        async with self._telling:
            below = sorted(other for other in self.experts if other.prefix == uid.prefix)
            await self.swarm.claim(self.peer, *below, hosted=self.experts)

    async def announce_all(self, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        while True:
            for prefix in sorted({uid.prefix for uid in self.experts}):
                await self.announce(prefix.below(0))
            await trio.sleep(ANNOUNCE_S)

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.log.recent() if event["name"] == name]


@dataclass
class ExpertSwarm:
    """Peers by name; all join through the first."""

    run: RunFile
    root: Path
    net: SimNet
    nursery: trio.Nursery
    peers: dict[str, ExpertPeer] = field(default_factory=dict)
    ports: dict[str, tuple[str, int]] = field(default_factory=dict)  # of each peer, with the name of its machine

    def make(self, name: str, most_bytes: int = 64 * MIB, at: str = "", **line: Any) -> ExpertPeer:
        """A peer on a machine of its own, or on the one of peer `at`."""
        carries = MemoryTransport(self.net, self.net.nodes[at]) if at else transport(self.net, name, **line)
        stack = peer_stack(keypair(name), SimClock(1, name), [carries])
        folder = self.root / name
        vault = Vault(self.run, stack, VaultDisk(folder), InlineWorker(), most_bytes)
        peer = self.peers[name] = ExpertPeer(name, stack, vault, folder)
        self.ports[name] = (at or name, 4001 + len(self.ports))
        return peer

    async def begin(self, peer: ExpertPeer) -> ExpertPeer:
        first = next(iter(self.peers.values()))
        bootstrap = [] if first is peer else first.stack.host.addrs()
        machine, port = self.ports[peer.name]
        await self.nursery.start(peer.run, addr_of(self.net, machine, port), bootstrap)
        for other in self.peers.values():  # as records tell them
            for one, of in ((peer, other), (other, peer)):
                one.stack.host.learn(of.id, of.stack.host.addrs())
        return peer

    async def start(self, *names: str, most_bytes: int = 64 * MIB) -> list[ExpertPeer]:
        return [await self.begin(self.make(name, most_bytes)) for name in names]

    async def host(self, name: str, *uids: Uid, places: int = 8, shares: bool = False) -> MadeUpHost:
        """A peer that hosts these experts, and shares them with others or does not."""
        host = MadeUpHost(self, self.make(name), places, shares=shares)
        for uid in uids:
            host.begin(uid, seed=name)
        await self.begin(host.peer)
        return host

    async def claim(self, peer: ExpertPeer, *uids: Uid, hosted: Mapping[Uid, FakeHosted]) -> None:
        """Announce experts below one prefix, as their host does every period."""
        prefix, addrs = uids[0].prefix, [str(addr) for addr in peer.stack.host.addrs()]
        announced = Announced(
            Name.of(prefix),
            bitmap([uid.at[-1] for uid in uids], grid_of(self.run).sides[-1]),
            [hosted[uid].generation for uid in uids],
            [hosted[uid].model.version for uid in uids],
            0.0,
            addrs,
        )
        await peer.stack.dht.put(prefix_key(self.run.run, prefix), encode(announced), ttl_s=60.0)


async def until(condition: Callable[[], bool], within_s: float) -> None:
    """Wait until `condition` is true; fails when it is not after so many seconds."""
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - any condition, on state that nobody announces
            await trio.sleep(0.5)


@asynccontextmanager
async def expert_swarm(root: Path, run: RunFile | None = None) -> AsyncIterator[ExpertSwarm]:
    with trio.fail_after(100_000):
        async with running_net() as net, trio.open_nursery() as nursery:
            yield ExpertSwarm(run or expert_run(), root, net, nursery)
            nursery.cancel_scope.cancel()


def in_expert_swarm(scene: Callable[[ExpertSwarm], Awaitable[T]], root: Path, run: RunFile | None = None) -> T:
    """Run `scene` in a swarm under a virtual clock of its own, and return its result."""

    async def whole() -> T:
        async with expert_swarm(root, run) as swarm:
            return await scene(swarm)

    return run_virtual(whole, seed=1)
