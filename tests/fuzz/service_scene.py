"""The scene of hostile sessions with services: a stage peer that conducts its run, and does all that a host can serve.

One host runs the role `stage` (which brings calls, averaging, state and the conductor's duty) with the real model on a
virtual device, the directory, a backbone's gift of a checkpoint, a relay, circuits, hole punching and reachability. A
second peer serves the other stage; the honest one only asks.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import trio

from peerd.core.errors import Overloaded, Refused, RemoteError
from peerd.dht.dht import Dht
from peerd.messages.proof import grant
from peerd.messages.swarm import Conducts, GrantStatement, Position, Seqs, StageAnswer, StageForward, WhoConducts
from peerd.pipeline.routes.microbatch_shapes import MicrobatchShapes
from peerd.pipeline.trainer_relay import TrainerRelay
from peerd.reach.autonat import AutoNat
from peerd.reach.hole_puncher import HolePuncher
from peerd.reach.relay.circuit_transport import Circuits
from peerd.reach.relay.relay import Relay
from peerd.role.role import RoleContext
from peerd.rpc.rpc import Rpc
from peerd.run.runfile import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvaluateSection,
    LimitsSection,
    ModelSection,
    PipelineSection,
    RunFile,
    fingerprint,
)
from peerd.state.snapshot import KEPT, StateItem, StateServer
from peerd.wire.host.host import Host
from roles.stage import StageRole
from tests.fuzz.session_points import WHO
from tests.fuzz.sessions import HOST, NETWORK, WITHIN_S, ServiceStage, attacked
from tests.worlds.network.hosts import Hosts, keypair, running_hosts
from tests.worlds.roles.contexts import role_context
from tests.worlds.roles.inline_worker import InlineWorker
from tests.worlds.roles.stagescene import microbatch
from tests.worlds.simulation.clock import SimClock

RUN = RunFile(
    run="hostile",
    seed=5,
    model=ModelSection(d_model=16, heads=2, layers=2, context=16),
    pipeline=PipelineSection(stages=2, microbatch=2),
    batch=BatchSection(target_samples=4),
    data=DataSection(path="none"),
    evaluate=EvaluateSection(every_steps=1000),
    checkpoint=CheckpointSection(every_steps=0),
)
MARK = fingerprint(RUN)
KEPT_POSITION = Position(3, b"kept")


@dataclass
class Peer:
    """One host with a role of its run."""

    host: Host
    rpc: Rpc
    role: Any


@dataclass(kw_only=True)
class RunStage(ServiceStage):
    """A stage peer that serves all there is, and one of the other stage."""

    served: Peer
    mate: Peer  # of the other stage
    relaying: TrainerRelay  # of the host, as if it were a trainer; nothing is under way

    @property
    def friends(self) -> frozenset[str]:
        return frozenset((self.host.id.text, self.honest.id.text, self.mate.host.id.text))

    async def is_answered(self) -> str:
        """The other stage is rid of strangers too, and each kind of service answers."""
        since = trio.current_time()
        if faults := self.mate.host.faults.places:
            return f"the other stage: {faults}"
        while others := [link for link in self.mate.host.links if link.peer.text not in self.friends]:
            if trio.current_time() - since > WITHIN_S:
                return f"the other stage still has {others}"
            await trio.sleep(0.05)
        return await self._calls_are_answered()

    async def _calls_are_answered(self) -> str:
        """The honest peer gets an answer of each kind of service; a refusal is one, where the hostile peer conducts."""
        input_frame = microbatch(1)[:1]
        granted = grant(keypair("host").sign, GrantStatement(MARK, 1, 0, self.honest.id.text, Seqs()))
        forward = StageForward(MARK, 0, grant=granted)
        try:
            await self.asks.call(
                self.host.id, "stage/6/forward", forward, StageAnswer, frames=input_frame, timeout_s=30
            )
            await self.asks.call(self.host.id, "swarm/6/who", WhoConducts(MARK), Conducts, timeout_s=30)
        except (Refused, Overloaded) as error:
            told = ("does not conduct", "is not of a conductor")
            return "" if any(text in str(error) for text in told) else f"an honest call is refused: {error}"
        except RemoteError as error:
            return f"an honest call is not answered: {error}"
        return ""


def pinned(stage: int, run: RunFile = RUN) -> RunFile:
    return msgspec.structs.replace(run, limits=LimitsSection(stage=stage))


async def start_peer(
    hosts: Hosts,
    name: str,
    run: RunFile,
    folder: Path,
    first: str = "host",
    role: Callable[[RoleContext], Any] = StageRole,
    **line: float,
) -> Peer:
    """A peer with `role`; `first` is the name of the peer that others join through."""
    host, clock = await hosts.start(name, HOST, **line), SimClock(1, name)
    rpc = Rpc(host, clock)
    dht = Dht(host, rpc, clock, keypair(name))
    await hosts.nursery.start(rpc.run)
    await hosts.nursery.start(dht.run, [hosts.addr(first)] if name != first else [])
    stack = SimpleNamespace(host=host, rpc=rpc, dht=dht, clock=clock)
    ctx = role_context(stack, run, folder / name, defaultdict(InlineWorker).__getitem__)
    peer = Peer(host, rpc, role(ctx))
    await hosts.nursery.start(peer.role.run)
    return peer


async def start_caller(hosts: Hosts, name: str = "honest") -> tuple[Host, Rpc]:
    """A host that only makes calls."""
    host = await hosts.start(name)
    rpc = Rpc(host, SimClock(1, name))
    await hosts.nursery.start(rpc.run)
    return host, rpc


async def _serve_ways(hosts: Hosts, peer: Peer) -> None:
    """All by which others reach and are reached."""
    host, clock = peer.host, SimClock(1, "ways")
    circuits = Circuits(host, clock)
    host.add_transport(circuits)
    parts = (circuits, Relay(host, clock, keypair("host")), HolePuncher(host, clock), AutoNat(host, clock))
    for part in parts:
        await hosts.nursery.start(part.run)


def _give_kept(peer: Peer) -> None:
    async def named(position: Position) -> tuple[Position, list[StateItem]] | None:
        await trio.lowlevel.checkpoint()
        data = np.arange(1000, dtype="uint8").data
        return (position, [StateItem("w", "uint8", (1000,), data)]) if position == KEPT_POSITION else None

    StateServer(peer.rpc, KEPT).offer_named(MARK, 0, named, InlineWorker())


@asynccontextmanager
async def services() -> AsyncIterator[RunStage]:
    """A run of two stages under way."""
    with tempfile.TemporaryDirectory() as folder:
        async with running_hosts(NETWORK) as hosts:
            served = await start_peer(hosts, "host", pinned(0), Path(folder))
            await _serve_ways(hosts, served)
            _give_kept(served)
            mate = await start_peer(hosts, "mate", pinned(1), Path(folder))
            honest, asks = await start_caller(hosts)
            serves = {(WHO.identity.peer_id.text, 0), (mate.host.id.text, 1)}
            relaying = TrainerRelay(served.rpc, serves, MicrobatchShapes(RUN))
            with relaying.serving():
                parts = {"served": served, "mate": mate, "asks": asks, "relaying": relaying}
                async with attacked(hosts, served.host, honest, RunStage, 5.0, **parts) as made:
                    assert await made.is_answered() == ""
                    yield made
