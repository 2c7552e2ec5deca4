"""A whole training swarm in one trio run: real hosts and roles on a simulated network, or over TCP on loopback.

The clock of the test decides. With `autojump_clock` the network is simulated, devices compute on the loop, and time is
virtual. Without it the peers listen on loopback, and each device computes in a thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol
from unittest import mock

import trio
from multiaddr import Multiaddr
from trio.testing import MockClock

from peerd.core.addr import parse_addr
from peerd.core.work import Worker
from peerd.log import EventLog
from peerd.model.worker import DeviceWorker
from peerd.role.peer_stack import PeerStack, peer_stack
from peerd.role.role import Role
from peerd.run.runfile import (
    BatchSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.wire.clock import RealClock
from peerd.wire.host.host import Host
from peerd.wire.link.sealing import Buffers
from peerd.wire.tcp.tcp_transport import TcpTransport
from roles.backbone import BackboneRole
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.exact import write_texts
from tests.kit.runs import changed
from tests.worlds.network.hosts import keypair
from tests.worlds.network.virtual import addr_of, running_net
from tests.worlds.roles.chaos import in_no_thread
from tests.worlds.roles.contexts import DEVICES, role_context
from tests.worlds.roles.virtualroles import PacedDevice
from tests.worlds.simulation.clock import SimClock
from tests.worlds.simulation.memory import MemoryTransport
from tests.worlds.simulation.simnet import SimLine, SimNet

LINE: Final = SimLine(latency_s=0.001)  # of a simulated peer
MICROBATCH_S: Final = 0.02  # virtual seconds that a device takes for a microbatch's backward


def small_run(folder: Path, **settings: Any) -> RunFile:
    """Two stages of a model so small that a step takes no time, on texts that are made in `folder`."""
    run = RunFile(
        run="small",
        seed=5,
        model=ModelSection(d_model=16, heads=2, layers=2, context=16),
        pipeline=PipelineSection(stages=2, microbatch=2),
        optimizer=OptimizerSection(name="adamw", lr=1e-3),
        batch=BatchSection(target_samples=8),
        data=DataSection(path=str(write_texts(folder)), holdout=0.1),
        evaluate=EvaluateSection(every_steps=0),
    )
    return changed(run, **settings)


def pinned(run: RunFile, stage: int) -> RunFile:
    """The run as a peer has it that serves `stage`."""
    return changed(run, limits={"stage": stage})


class Network(Protocol):
    """A network, a clock and workers for the peers of a swarm."""

    def stack(self, name: str) -> PeerStack:
        """The protocol stack of a new peer, or of an old one that starts again."""
        ...

    def listen(self, name: str) -> Multiaddr:
        """The address that the peer listens on."""
        ...

    def worker(self, device: str) -> AbstractAsyncContextManager[Worker]: ...

    def cut_off(self, name: str) -> None:
        """Break the peer's links at once, so that nothing it still sends arrives."""
        ...


class Loopback:
    """TCP on loopback, the real clock, a thread for each device."""

    def stack(self, name: str) -> PeerStack:
        return peer_stack(keypair(name), RealClock(seed=1), [TcpTransport()])

    def listen(self, name: str) -> Multiaddr:
        return parse_addr("/ip4/127.0.0.1/tcp/0")

    def worker(self, device: str) -> AbstractAsyncContextManager[Worker]:
        return DeviceWorker(device, threads=1)

    def cut_off(self, name: str) -> None:
        """Its sockets close when its tasks are cancelled."""


class Simulated:
    """A simulated network, virtual time, devices that compute on the loop."""

    def __init__(self, net: SimNet) -> None:
        self._net, self._buffers = net, Buffers()
        self.ips: dict[str, str] = {}  # of peers that shall have a certain address, by name
        self._starts = Counter[str]()

    def stack(self, name: str) -> PeerStack:
        if name in self._net.nodes:
            self._net.revive(name)
        else:
            self._net.add_node(name, LINE, self.ips.get(name, ""))
        self._starts[name] += 1
        clock = SimClock(1, f"{name}/{self._starts[name]}")
        transport = MemoryTransport(self._net, self._net.nodes[name])
        return peer_stack(keypair(name), clock, [transport], buffers=self._buffers)

    def listen(self, name: str) -> Multiaddr:
        return addr_of(self._net, name)

    def worker(self, device: str) -> AbstractAsyncContextManager[Worker]:
        return nullcontext(PacedDevice(MICROBATCH_S))

    def cut_off(self, name: str) -> None:
        self._net.kill(name)


@dataclass
class Peer:
    """One peer with one role. `kill` cuts it off without a word."""

    name: str
    host: Host
    role: Any
    log: EventLog
    scope: trio.CancelScope
    network: Network
    ready: trio.Event = field(default_factory=trio.Event)
    finished: trio.Event = field(default_factory=trio.Event)
    gone: trio.Event = field(default_factory=trio.Event)

    def kill(self) -> None:
        if not self.scope.cancel_called:
            self.network.cut_off(self.name)
            self.scope.cancel()


class Swarm:
    """Peers of one network; all others join through the one that starts first."""

    def __init__(self, directory: Path, network: Network, nursery: trio.Nursery) -> None:
        self.network = network
        self._directory = directory
        self._nursery = nursery
        self.entry: list[Any] = []
        self.peers: dict[str, Peer] = {}
        self.started: list[Peer] = []

    async def start(self, name: str, role: type[Role], run: RunFile | None) -> Peer:
        """A new peer, or an old one again (same name: same identity and directory)."""
        peer: Peer = await self._nursery.start(self._run, name, role, run)
        self.peers[name] = peer
        self.started.append(peer)
        if not self.entry:
            self.entry = peer.host.addrs()
        return peer

    async def _run(
        self, name: str, role: type[Role], run: RunFile | None, *, task_status: trio.TaskStatus[Peer]
    ) -> None:
        net = self.network.stack(name)
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                await nursery.start(net.run, [self.network.listen(name)], self.entry)
                log = EventLog(net.clock)
                workers: dict[str, Worker] = {}
                for device in DEVICES:
                    workers[device] = await stack.enter_async_context(self.network.worker(device))
                folder = self._directory / name
                built = role(role_context(net, run, folder, workers.__getitem__, log.bind(peer=name)))
                peer = Peer(name, net.host, built, log, scope, self.network)
                task_status.started(peer)
                async with trio.open_nursery() as inner:
                    await inner.start(built.run)
                    peer.ready.set()
                peer.finished.set()
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()
        peer.gone.set()


@asynccontextmanager
async def _network() -> AsyncIterator[Network]:
    if not isinstance(trio.lowlevel.current_clock(), MockClock):
        yield Loopback()
        return
    with mock.patch("trio.to_thread.run_sync", in_no_thread):
        async with running_net() as net:
            yield Simulated(net)


@asynccontextmanager
async def swarm(directory: Path) -> AsyncIterator[Swarm]:
    """A swarm whose peers end with the block: simulated under a virtual clock, else over TCP."""
    async with _network() as network, trio.open_nursery() as nursery:
        all_peers = Swarm(directory, network, nursery)
        yield all_peers
        for peer in all_peers.started:
            peer.kill()
        for peer in all_peers.started:  # roles end before what they stand on
            await peer.gone.wait()
        nursery.cancel_scope.cancel()


async def stage_peers(s: Swarm, run: RunFile, count: int) -> list[Peer]:
    """Start a backbone, and peers that serve the run's stages in turn."""
    await s.start("backbone", BackboneRole, None)
    stages = run.pipeline.stages
    return [await s.start(f"stage{i}", StageRole, pinned(run, i % stages)) for i in range(count)]


async def pipeline(s: Swarm, run: RunFile, count: int, trainers: int = 1) -> tuple[list[Peer], list[Peer]]:
    """Start a backbone, `count` stage peers, and trainers; returns the stage peers and the trainers."""
    peers = await stage_peers(s, run, count)
    return peers, [await s.start(f"trainer{i}", TrainerRole, run) for i in range(trainers)]


async def replicas(s: Swarm, run: RunFile, count: int) -> list[Peer]:
    """Start a backbone, and trainers that each hold the whole model."""
    await s.start("backbone", BackboneRole, None)
    return [await s.start(f"replica{i}", TrainerRole, run) for i in range(count)]


def member(peer: Peer) -> Any:
    """The stage member of a peer: its role, or the replica of a trainer."""
    return peer.role.replica if isinstance(peer.role, TrainerRole) else peer.role


def events(peers: Iterable[Peer]) -> list[str]:
    """The peers' log events, for a failing test's message."""
    return [str(event) for peer in peers for event in peer.log.recent(30)]


async def all_finished(s: Swarm, peers: Iterable[Peer], within_s: float = 200.0) -> None:
    """Fails with what every peer told lately."""
    with trio.move_on_after(within_s) as limit:
        for peer in peers:
            await peer.finished.wait()
    assert not limit.cancelled_caught, "\n".join(events(s.peers.values()))


async def reaches(s: Swarm, peer: Peer, step: int, within_s: float = 200.0) -> None:
    """Wait until a stage peer or a replica is at a step."""
    with trio.move_on_after(within_s) as limit:
        while member(peer).position.step < step:
            await member(peer).moved()
    assert not limit.cancelled_caught, f"{peer.name} did not reach step {step}\n" + "\n".join(events(s.peers.values()))


async def until_equal(s: Swarm, one: Peer, other: Peer, beyond: int) -> None:
    """Wait until two mates are at the same position beyond a step, and check that they have the same bits there."""
    with trio.move_on_after(60):
        while True:
            (place, ours), (there, theirs) = [await p.role.post.catching_up.freeze() for p in (one, other)]
            if place == there and place.step > beyond:
                assert ours.specs == theirs.specs
                assert [bytes(piece) for *_, piece in ours.pieces()] == [bytes(piece) for *_, piece in theirs.pieces()]
                return
            await (one if place.step < there.step else other).role.moved()
    raise AssertionError("they never met\n" + "\n".join(events(s.peers.values())))


def with_line(run: RunFile, mbit: float) -> RunFile:
    """The run file of a peer whose line carries so much in each direction."""
    return changed(run, limits={"upload_mbit": mbit, "download_mbit": mbit})
