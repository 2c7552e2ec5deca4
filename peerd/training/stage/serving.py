"""Serving of a stage to trainers: forward, loss and backward, with the present parameters and for the present step.

Only computes: the post decides which microbatches a step counts, and when parameters change. Invariants: every call
names its run, stage and step, and is refused at any other, but for the next one in a delayed run; a step that is being
averaged takes nothing new, nor does a peer that leaves; a sum takes no microbatch that no conductor has admitted; at
most one call's tensors are computed with at a time. A hostile trainer may send wrong frames, shapes and values, steps
that are not, microbatches that were not admitted, and any number of calls: each is refused, the last before its frames
are received, and the trainer is named where it broke the protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from peerd.compute.model.served_stage import ServedStage, StageOutcome, Stale
from peerd.core.errors import PeerdError, ProtocolViolation, Refused
from peerd.core.ids import PeerId
from peerd.core.messages.swarm import Mb, Receipt, StageAnswer, StageBackward, StageForward, StageLoss
from peerd.core.run.runfile import RunFile
from peerd.role import RoleContext
from peerd.service.rpc.rpc import Answer, Incoming
from peerd.training.stage.admissions import Admissions
from peerd.training.stage.boundary import Boundary


class StagePlace(Protocol):
    """The post that is served."""

    stage: int
    admissions: Admissions

    @property
    def step(self) -> int:
        """The step of the parameters."""
        ...

    def receipt(self, step: int, mb: Mb) -> Receipt:
        """A receipt that this peer holds a microbatch's gradient."""
        ...

    @property
    def served(self) -> ServedStage: ...

    @property
    def relieved(self) -> bool:
        """True when the post is being left, and others of its stage are there to take its place."""
        ...


class Serving:
    """Answers `forward`, `loss` and `backward`, once `boundary` runs. `closing`: this step's sum is being averaged."""

    def __init__(self, ctx: RoleContext, run: RunFile, place: StagePlace) -> None:
        self._run, self._place = run, place
        self._worker = ctx.worker(ctx.device)
        self.boundary = Boundary(ctx, run)
        self.closing = False
        self.samples = 0
        self._busy_s = 0.0

    def rate(self) -> float:
        """Samples per second of computing: what this device can do when it is never idle."""
        return self.samples / self._busy_s if self._busy_s else 0.0

    def worked(self, samples: int, seconds: float) -> None:
        """Count what this peer's own trainer has computed beside the calls."""
        self.samples += samples
        self._busy_s += seconds

    def _check(self, step: int | None) -> ServedStage:
        if step is not None and not 0 <= step - self._place.step <= int(self._run.optimizer.delayed):
            raise Refused(f"the stage is at step {self._place.step}, the call at {step}")
        return self._place.served

    async def _compute(self, peer: PeerId, job: Callable[[], StageOutcome], name: str) -> StageOutcome:
        """Run a trainer's call; ProtocolViolation of the trainer when its tensors are wrong."""
        try:
            outcome = await self._worker.run(job, name=name)
        except Stale as error:
            raise Refused(str(error)) from None
        except ValueError as error:
            raise ProtocolViolation(str(error), peer) from None
        self._busy_s += outcome.seconds
        return outcome

    async def forward(self, call: Incoming[StageForward]) -> Answer[StageAnswer]:
        """The stage's output for an input."""
        body, served = call.body, self._check(call.body.step)
        self._refuse_when_leaving()
        async with self.boundary.room:
            (x,) = await self.boundary.tensors(call, "the input")
            outcome = await self._compute(call.peer, lambda: served.forward(body.step, x), "forward")
            name = f"the output of stage {body.stage}"
            return await self.boundary.answer(call, outcome, name, body.line_bytes_per_s)

    async def loss(self, call: Incoming[StageLoss]) -> Answer[StageAnswer]:
        """The loss of inputs and targets, at the last stage."""
        served = self._check(None)
        async with self.boundary.room:
            x, targets = await self.boundary.tensors(call, "the input", "the targets")
            outcome = await self._compute(call.peer, lambda: served.loss(x, targets), "loss")
            return await self.boundary.answer(call, outcome, "")

    def objection(self, peer: PeerId, body: StageBackward) -> PeerdError | None:
        """The reason that a microbatch is not taken, by the call's body alone, its grant with it; None: it is taken."""
        try:
            self._check(body.step)
            self._refuse_when_closing(body.step)
            self._refuse_when_leaving()
        except Refused as error:
            return error
        return self._place.admissions.objection(peer, body.step, body.seq, body.grant)

    async def backward(self, call: Incoming[StageBackward]) -> Answer[StageAnswer]:
        """The backward of a microbatch: its gradient counts here, and the input's goes back."""
        body, served = call.body, self._check(call.body.step)
        mb = Mb(call.peer.text, body.seq)
        self._need_a_microbatch(call)
        async with self.boundary.room:
            x, target = await self.boundary.tensors(call, "the input", "the output's gradient or the targets")
            self._refuse_when_closing(body.step)  # once more: nothing may come in between now and the device's queue

            def backward() -> StageOutcome:
                served.make_room(body.step, mb, body.grant.seqs if body.grant is not None else ())
                return served.backward(body.step, mb, (x, target), call.frames)

            outcome = await self._compute(call.peer, backward, "backward")
            self.samples += self._run.pipeline.microbatch
            name = f"the input gradient of stage {body.stage}"
            answer = await self.boundary.answer(call, outcome, name, body.line_bytes_per_s)
        return Answer(structs.replace(answer.body, receipt=self._place.receipt(body.step, mb)), answer.frames)

    def _need_a_microbatch(self, call: Incoming[StageBackward]) -> None:
        """ProtocolViolation for another number of samples than a microbatch has: a step divides by that number."""
        due = self._run.pipeline.microbatch
        if any(frame.shape[:1] != (due,) for frame in call.frames):
            raise ProtocolViolation(f"a microbatch has {due} samples, these frames another number", call.peer)

    def _refuse_when_closing(self, step: int) -> None:
        if self.closing and step <= self._place.step:
            raise Refused("the stage is averaging")

    def _refuse_when_leaving(self) -> None:
        """A leaving peer takes nothing new, unless it is the last of its stage."""
        if self._place.relieved:
            raise Refused("this peer is leaving")
