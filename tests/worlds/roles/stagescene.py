"""One stage peer that conducts, and others that call it as trainers and conductors do; for tests of what it takes.

The next stage is played by the scene: it answers with the gradient that a test wants stage 0 to get.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio

from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import from_frame
from peerd.core.errors import Refused
from peerd.messages.handover import Hop, PassAnswer, PassRequest, Ticket
from peerd.messages.proof import grant, signed_ticket
from peerd.messages.swarm import Grant, GrantStatement, Mb, Mbs, MemberInfo, Party, Prepare, Prepared, Seqs
from peerd.model.stage.served_stage import ServedStage
from peerd.pipeline.next_stage import PASS
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import RunFile, fingerprint
from roles.backbone import BackboneRole
from roles.stage import StageRole
from tests.kit.declared import declared
from tests.worlds.roles.training import Peer, Swarm, pinned, swarm

BATCH = 4  # microbatches of a `small_run`


class Scene:
    """A peer of stage 0 that conducts, and others that call it."""

    def __init__(self, s: Swarm, run: RunFile) -> None:
        self.s, self.run, self.mark = s, run, fingerprint(run)
        self.gradients: dict[tuple[str, int], TensorFrame] = {}  # that the next stage gives, by trainer and number
        self.attempts = 0

    @classmethod
    @asynccontextmanager
    async def running(cls, folder: Path, run: RunFile, *trainers: str) -> AsyncIterator[Any]:
        """A scene, and each of these trainers."""
        async with swarm(folder / "peers") as s:
            scene = cls(s, run)
            await scene.start(*trainers)
            yield scene, *(s.peers[name] for name in trainers)

    async def start(self, *trainers: str) -> None:
        for name in (*trainers, "after"):
            await self.s.start(name, BackboneRole, None)
        self.stage = await self.s.start("stage0", StageRole, pinned(self.run, 0))
        await self.stage.ready.wait()
        with trio.fail_after(60):
            following = self.stage.role._services.following
            while following.conductor != self.stage.host.id:  # it takes on the duty by itself
                await following.told.wait()
        for name in trainers:
            self.s.peers[name].host.learn(self.stage.host.id, self.stage.host.addrs())
        self._start_after()

    def _start_after(self) -> None:
        """Have stage 0 take the peer `after` for one of the next stage."""
        self.after = self.s.peers["after"]
        limits = declared(frames=2, frame_bytes=1 << 20)
        self.after.role._ctx.rpc.serve(PASS, PassRequest, self._give_gradient, declared=limits)
        self.stage.host.learn(self.after.host.id, self.after.host.addrs())
        told = MemberInfo(self.after.host.id.text, 1, [], True, since=1.0)
        handover = self.stage.role.post.handover
        note = handover.note_members
        handover.note_members = lambda members: note([*members, told])
        handover.note_members(self.stage.role.post.members)

    def admitted(self, trainer: Peer, *seqs: int, step: int = 0, by: Any = None, helped: bool = False) -> Grant:
        statement = GrantStatement(self.mark, 1, step, trainer.host.id.text, Seqs.of(seqs), helped)
        return grant(by or self.stage.host.sign, statement)

    async def backward(
        self,
        trainer: Peer,
        seq: int,
        shown: Grant | None,
        frames: Sequence[TensorFrame] | None = None,
        timeout_s: float = 10.0,
    ) -> Hop:
        """Have stage 0 compute a microbatch of `frames`: the tokens, and the gradient that the next stage gives.

        Raises Refused if it reports that the next stage gave none that is valid.
        """
        own, route = trainer.host.id.text, [self.stage.host.id.text, self.after.host.id.text]
        *sent, self.gradients[own, seq] = frames or microbatch(seq)
        self.attempts += 1
        bare = Ticket(0, seq, self.attempts, 0, 0, 0, route)
        body = PassRequest(self.mark, 0, own, signed_ticket(trainer.host.sign, self.mark, own, bare), shown)
        answer = await trainer.role._ctx.rpc.call(
            self.stage.host.id, PASS, body, PassAnswer, frames=sent, timeout_s=timeout_s
        )
        if answer.body.broken is not None:
            raise Refused(answer.body.broken.reason)
        (hop,) = answer.body.hops
        return hop

    async def _give_gradient(self, call: Incoming[PassRequest]) -> Answer[PassAnswer]:
        """What the next stage has kept of a microbatch."""
        await trio.lowlevel.checkpoint()
        return Answer(PassAnswer(), (self.gradients[call.body.trainer, call.body.ticket.seq],))

    async def prepare(self, *assigned: Mb, attempt: bytes = b"a" * 16, beside: Sequence[Peer] = ()) -> Prepared:
        """By the conductor's order, with `beside` as stage-mates."""
        own = self.stage.host.id
        group = sorted([own.text, *(peer.host.id.text for peer in beside)])
        order = Prepare(self.mark, 1, 0, attempt, b"next", group, Mbs.of(assigned), 2 * BATCH, 30.0)
        answer = await self.stage.role._ctx.rpc.call(own, "stage/6/prepare", order, Prepared, timeout_s=30)
        return answer.body

    async def copy(self, mate: Peer, of: bytes, attempt: bytes) -> Prepared:
        """By the conductor's order, of the sum of the attempt `of`, for `mate`."""
        own, listens = self.stage.host.id, mate.host.id.text
        group = sorted([own.text, listens])
        more: dict[str, Any] = {"listeners": [listens], "brings": of}
        order = Prepare(self.mark, 1, 0, attempt, b"next", group, Mbs(), 2 * BATCH, 30.0, **more)
        answer = await self.stage.role._ctx.rpc.call(own, "stage/6/prepare", order, Prepared, timeout_s=30)
        return answer.body

    async def help(self, mate: Peer, attempt: bytes) -> Prepared:
        """By the conductor's order, without a gradient of its own, for `mate`."""
        own, one = self.stage.host.id, mate.host.id.text
        parties = [Party(one, "node", 0.5), Party(own.text, "aux", 0.5)]
        order = Prepare(
            self.mark, 1, 0, attempt, b"next", [one], Mbs(), 2 * BATCH, 30.0, parties, elements=1 << 16, dtype="float32"
        )
        answer = await self.stage.role._ctx.rpc.call(own, "stage/6/prepare", order, Prepared, timeout_s=30)
        return answer.body

    def honest(self, *seqs: int) -> ServedStage:
        """The stage as it were with these alone, in this order."""
        torch.set_num_threads(1)
        alone = ServedStage(self.run, 0, "cpu")
        for seq in seqs:
            frames = microbatch(seq)
            x, gradient = (from_frame(frame) for frame in frames)
            alone.backward(0, Mb("t", seq), (x, gradient), frames)
        return alone


def microbatch(number: int, size: float = 1.0) -> list[TensorFrame]:
    """Tokens, and the gradient of what stage 0 gives."""
    rng = np.random.default_rng(number)
    tokens = rng.integers(0, 256, (2, 16)).astype("uint8")
    gradient = (rng.standard_normal((2, 16, 16)) * size).astype("float32")
    return [TensorFrame(a.dtype.name, a.shape, a.data.cast("B")) for a in (tokens, gradient)]


def digest(served: ServedStage) -> bytes:
    return hashlib.sha256(served.vector().tobytes()).digest()
