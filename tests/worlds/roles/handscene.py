"""Real stage peers of three stages on a simulated network, and others that call them by what hand-over knows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.messages.handover import PassAnswer, PassRequest, Ticket
from peerd.messages.proof import grant, signed_ticket
from peerd.messages.swarm import Grant, GrantStatement, Mb, MemberInfo, Seqs
from peerd.pipeline.direct import DirectPipeline
from peerd.pipeline.microbatch import Microbatch
from peerd.pipeline.next_stage import PASS
from peerd.pipeline.stage_client import TrainerCredentials
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.run.runfile import BatchSection, ModelSection, PipelineSection, fingerprint
from peerd.wire.host.host import Host
from tests.fuzz.service_scene import RUN, Peer, pinned, start_peer
from tests.kit.declared import declared
from tests.kit.virtual_time import within
from tests.worlds.network.hosts import Hosts, keypair, running_hosts
from tests.worlds.simulation.clock import SimClock

RUN3 = msgspec.structs.replace(
    RUN,
    run="handing",
    model=ModelSection(d_model=16, heads=2, layers=3, context=16),
    pipeline=PipelineSection(stages=3, microbatch=2),
    batch=BatchSection(target_samples=64),  # no step ends meanwhile
)
MARK = fingerprint(RUN3)
STAGE_PEERS = ("a0", "a1", "a2", "b1")


def text(name: str) -> str:
    return keypair(name).peer_id.text


def tokens(number: int) -> TensorFrame:
    values = np.random.default_rng(number).integers(0, 256, (2, 16)).astype("uint8")
    return TensorFrame("uint8", (2, 16), values.data.cast("B"))


def hidden(number: int, size: float = 1.0, samples: int = 2) -> TensorFrame:
    values = (np.random.default_rng(number).standard_normal((samples, 16, 16)) * size).astype("float32")
    return TensorFrame("float32", values.shape, values.data.cast("B"))


class HandScene:
    """The stage peers, by name, and the calls of whoever else there is."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._hosts, self._folder = hosts, folder
        self.peers: dict[str, Peer] = {}
        self.rpcs: dict[str, Rpc] = {}
        self.hosts: dict[str, Host] = {}
        self.listed: list[MemberInfo] = []  # in addition to whom the conductor lists

    async def start(self) -> None:
        for name in STAGE_PEERS:
            run = pinned(int(name[-1]), RUN3)
            self.peers[name] = peer = await start_peer(self._hosts, name, run, self._folder, "a0")
            self.rpcs[name] = peer.rpc
        for _ in range(600):
            await trio.sleep(0.1)
            if all(
                len([m for m in peer.role.post.members if m.since and m.ready]) == 4 for peer in self.peers.values()
            ):
                return
        raise AssertionError("the stage peers have not found each other")

    async def join(self, name: str, **line: float) -> Rpc:
        """A peer that has no role, and knows the others."""
        host = self.hosts[name] = await self._hosts.start(name, None, **line)
        rpc = self.rpcs[name] = Rpc(host, SimClock(1, name))
        await self._hosts.nursery.start(rpc.run)
        for other in self.peers:
            await host.connect(keypair(other).peer_id, [self._hosts.addr(other)])
        return rpc

    async def join_stage(
        self, name: str, answer: Callable[[Incoming[PassRequest]], Awaitable[Any]], **line: float
    ) -> Rpc:
        """A peer that all take for one of the stage in its name."""
        rpc = await self.join(name, **line)
        rpc.serve(PASS, PassRequest, answer, declared=declared(frames=2, frame_bytes=1 << 20))
        told = MemberInfo(text(name), int(name[-1]), [], True, since=2.0)
        self.listed.append(told)
        for peer in self.peers.values():
            self._list(peer, told)
        return rpc

    def _list(self, peer: Peer, told: MemberInfo) -> None:
        """As if the conductor listed it from now on."""
        handover = peer.role.post.handover
        note = handover.note_members
        handover.note_members = lambda members: note([*members, told])
        handover.note_members(peer.role.post.members)

    # --- what is said ---------------------------------------------------------------------------------------------

    def granted(self, trainer: str, *seqs: int, step: int = 0, by: str = "a0") -> Grant:
        return grant(keypair(by).sign, GrantStatement(MARK, 1, step, text(trainer), Seqs.of(seqs or range(64))))

    def body(self, stage: int, trainer: str, shown: Ticket, **changes: Any) -> PassRequest:
        good = PassRequest(MARK, stage, text(trainer), shown, self.granted(trainer))
        return msgspec.structs.replace(good, **changes)

    def ticket(
        self,
        trainer: str,
        seq: int,
        *route: str,
        low: int = 0,
        high: int = 2,
        first: int = 0,
        by: str = "",
        **rest: Any,
    ) -> Ticket:
        bare = Ticket(rest.get("step", 0), seq, rest.get("attempt", 0), low, high, first, list(map(text, route)))
        return signed_ticket(keypair(by or trainer).sign, rest.get("run", MARK), text(by or trainer), bare)

    async def call(
        self, caller: str, to: str, body: PassRequest, frames: Sequence[TensorFrame], timeout_s: float = 100.0
    ) -> Answer[PassAnswer]:
        peer = keypair(to).peer_id
        return await self.rpcs[caller].call(peer, PASS, body, PassAnswer, frames=frames, timeout_s=timeout_s)

    def pipeline(self, trainer: str) -> DirectPipeline:
        """An honest trainer's, which relays as long as it is there."""

        class Ways:
            def linked(self, peer: Any) -> bool:
                return True

            def doubt(self, peer: Any) -> float:
                return 0.0

        papers = TrainerCredentials(text(trainer), lambda seq: self.granted(trainer), keypair(trainer).sign)
        made = DirectPipeline(RUN3, self.rpcs[trainer], SimClock(1, trainer), Ways(), papers)
        made.update([*self.peers["a0"].role.post.members, *self.listed])
        return made

    def load(self, number: int) -> Microbatch:
        return Microbatch(tokens(number), tokens(number + 1000))

    # --- what came of it ------------------------------------------------------------------------------------------

    def held(self, name: str) -> list[tuple[str, int]]:
        """The microbatches that count at a stage peer."""
        mbs: list[Mb] = self.peers[name].role.post.served.held
        return [(mb.trainer, mb.seq) for mb in mbs]

    def sum_of(self, name: str) -> bytes:
        return bytes(self.peers[name].role.post.served.vector().tobytes())

    def faults(self) -> list[str]:
        """Errors of ours that something has caused."""
        return [f"{name}: {place}" for name, peer in self.peers.items() for place in peer.host.faults.places]


@asynccontextmanager
async def hand_scene(folder: Path) -> AsyncIterator[HandScene]:
    """Four stage peers; nothing that a test does beside them may be a fault of theirs."""
    torch.set_num_threads(1)
    async with running_hosts() as hosts:
        scene = HandScene(hosts, folder)
        await scene.start()
        yield scene
        assert scene.faults() == []


in_scene = within(hand_scene, "tmp_path")
