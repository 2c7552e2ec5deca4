"""A whole training swarm in one trio run: real hosts over TCP on loopback, real roles, threads for computing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import trio

from peerd.compute.worker import DeviceWorker
from peerd.core.addr import parse_addr
from peerd.core.keys import Keypair
from peerd.core.run.runfile import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.core.work import Worker
from peerd.log import EventLog
from peerd.net.clock import RealClock
from peerd.net.host.host import Host
from peerd.net.tcp.tcp_transport import TcpTransport
from peerd.role import Role, RoleContext
from peerd.service.peer_stack import peer_stack
from peerd.service.run_services import RunServices


def small_run(name: str, text: Path, evaluate: EvaluateSection, checkpoint: CheckpointSection) -> RunFile:
    """Two stages of a model so small that a step takes no time."""
    return RunFile(
        run=name,
        seed=5,
        model=ModelSection(d_model=16, heads=2, layers=2, context=16),
        pipeline=PipelineSection(stages=2, microbatch=2),
        optimizer=OptimizerSection(name="adamw", lr=1e-3),
        batch=BatchSection(target_samples=8),
        data=DataSection(path=str(text), holdout=0.1),
        evaluate=evaluate,
        checkpoint=checkpoint,
    )


def pinned(run: RunFile, stage: int) -> RunFile:
    """The run as a peer has it that serves `stage`."""
    return msgspec.structs.replace(run, limits=msgspec.structs.replace(run.limits, stage=stage))


@dataclass
class Peer:
    """One peer with one role. `kill` cuts it off without a word."""

    name: str
    host: Host
    role: Any
    log: EventLog
    scope: trio.CancelScope
    ready: trio.Event = field(default_factory=trio.Event)
    finished: trio.Event = field(default_factory=trio.Event)
    gone: trio.Event = field(default_factory=trio.Event)

    def kill(self) -> None:
        self.scope.cancel()


class Swarm:
    """Peers on loopback; the first one that starts is everybody's way in."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        self._directory = directory
        self._nursery = nursery
        self.entry: list[Any] = []
        self.peers: dict[str, Peer] = {}
        self.started: list[Peer] = []

    async def start(self, name: str, role: type[Role], run: RunFile | None, wait: bool = True) -> Peer:
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
        clock = RealClock(seed=1)
        net = peer_stack(Keypair.from_seed(name.encode().ljust(32, b".")), clock, [TcpTransport()])
        directory = self._directory / name
        directory.mkdir(parents=True, exist_ok=True)
        async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                await nursery.start(net.run, [parse_addr("/ip4/127.0.0.1/tcp/0")], self.entry)
                log = EventLog(clock)
                workers: dict[str, Worker] = {}
                for device in ("cpu", "files", "data", "coding"):
                    workers[device] = await stack.enter_async_context(DeviceWorker(device, threads=1))
                built = role(
                    RoleContext(
                        run=run,
                        services=RunServices(run, net.host, net.rpc, net.dht, clock) if run is not None else None,
                        host=net.host,
                        rpc=net.rpc,
                        dht=net.dht,
                        clock=clock,
                        data_dir=directory,
                        device="cpu",
                        seed=1,
                        log=log.bind(peer=name),
                        worker=workers.__getitem__,
                    )
                )
                peer = Peer(name, net.host, built, log, scope)
                task_status.started(peer)
                async with trio.open_nursery() as inner:
                    await inner.start(built.run)
                    peer.ready.set()
                peer.finished.set()
                await trio.sleep_forever()
            nursery.cancel_scope.cancel()
        peer.gone.set()


@asynccontextmanager
async def swarm(directory: Path) -> AsyncIterator[Swarm]:
    """All peers end with the block."""
    async with trio.open_nursery() as nursery:
        all_peers = Swarm(directory, nursery)
        yield all_peers
        for peer in all_peers.started:  # roles end before what they stand on
            peer.kill()
            await peer.gone.wait()
        nursery.cancel_scope.cancel()


def events(peers: Iterable[Peer]) -> list[str]:
    """The peers' log events, for a failing test's message."""
    return [str(event) for peer in peers for event in peer.log.recent(30)]


async def all_finished(s: Swarm, peers: Iterable[Peer], within_s: float = 200.0) -> None:
    """Fails with what every peer told lately."""
    with trio.move_on_after(within_s) as limit:
        for peer in peers:
            await peer.finished.wait()
    assert not limit.cancelled_caught, "\n".join(events(s.peers.values()))


def with_line(run: RunFile, mbit: float) -> RunFile:
    """The run file of a peer whose line carries so much in each direction."""
    limits = msgspec.structs.replace(run.limits, upload_mbit=mbit, download_mbit=mbit)
    return msgspec.structs.replace(run, limits=limits)
