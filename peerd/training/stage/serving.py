"""Serving of a stage: outputs, losses and gradients, with the present parameters and for the present step.

What trainers call is here; what stage peers hand on to each other is `handover`'s, computed by the same methods.

Only computes: the post decides which microbatches a step counts, and when parameters change. Invariants: every call
names its run, stage and step, and is refused at any other, but for the next one in a delayed run; a step that is being
averaged takes nothing new, nor does a peer that leaves; nothing is computed for a caller without a grant: of a
microbatch that a conductor has admitted, or for the one trainer that evaluates; at most one call's tensors are computed
with at a time, and none that would not fit into the memory that is left. A hostile trainer may send wrong frames,
shapes and values, steps that are not, microbatches that were not admitted, and any number of calls: what its body and
its frames' headers show is refused before its frames are received, calls have their turns by `FairTurns`, and the
trainer is named where it broke the protocol. A result of our own that is not finite is never sent: the caller gets
NotFiniteHere, and decides whether another peer of this stage computes the microbatch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import trio
from msgspec import structs

from peerd.compute.model.footprint import lacking_for_call
from peerd.compute.model.kept_graph import KeptGraph
from peerd.compute.model.served_stage import ServedStage, StageOutcome, Stale
from peerd.compute.model.stage_module import ResultNotFinite
from peerd.core.errors import NoMemory, NotFiniteHere, Overloaded, PeerdError, ProtocolViolation, Refused
from peerd.core.frame import TensorFrame
from peerd.core.ids import PeerId
from peerd.core.limits import HELD_PADDING_BYTES
from peerd.core.messages.swarm import Mb, Receipt, StageAnswer, StageBackward, StageForward, StageLoss
from peerd.core.run.runfile import RunFile
from peerd.machine.budget.book import User
from peerd.machine.pipeline.fair_turns import Turn
from peerd.machine.pipeline.wiring import BACKWARD_COST
from peerd.machine.rebalance.load_meter import LoadMeter
from peerd.role import RoleContext
from peerd.service.rpc.rpc import Answer, Incoming
from peerd.training.stage.admissions import Admissions
from peerd.training.stage.boundary import Boundary

_STEP_S: Final = 0.05  # in which a commit that others have made usually comes here, too
_NO_MEMORY_S: Final = 1.0  # until a microbatch that found no memory is worth another try
_TELL_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Made:
    """What was computed of a microbatch. `frames`: the output, or the input's gradient; none in the first stage's."""

    loss_sum: float  # over the samples, of the last stage's backward
    service_s: float  # of computing
    frames: tuple[TensorFrame, ...]
    graph: KeptGraph | None = None  # of an output, where it is kept for the backward


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


class ServingCalls:
    """Answers `forward`, `loss` and `backward`, once `boundary` runs. `closing`: this step's sum is being averaged."""

    def __init__(self, ctx: RoleContext, run: RunFile, place: StagePlace) -> None:
        self._run, self._place = run, place
        self._worker, self._arrival_rate, self._log = ctx.worker(ctx.device), ctx.rpc.arrival_rate, ctx.log
        self._links = ctx.host.links
        self._told_again_at = float("-inf")  # that there is no memory
        self._not_finite_at = -1  # the step at which the log said that a result is not finite
        self.boundary = Boundary(ctx, run)
        self.closing = False
        self.spared_at = -1  # the step for which others of the stage compute what is still to be done
        self.samples = 0
        self.load = LoadMeter(trio.current_time())
        self._busy_s = 0.0

    def rate(self) -> float:
        """Samples per second of computing: what this device can do when it is never idle."""
        return self.samples / self._busy_s if self._busy_s else 0.0

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is kept of the microbatches that count here."""
        return self._place.served.kept_bytes

    def worked(self, samples: int, seconds: float) -> None:
        """Count what this peer's own trainer has computed beside the calls."""
        self.samples += samples
        self._busy_s += seconds
        self.load.worked(samples / self._run.pipeline.microbatch, seconds)

    def stage_at(self, step: int | None) -> ServedStage:
        """The stage, if it is at `step`, or near enough in a delayed run; else Refused. None: at whatever step.

        Overloaded where the stage is about to come there: a caller that heard of the commit first tries again soon.
        """
        ahead = 0 if step is None else step - self._place.step
        told = f"the stage is at step {self._place.step}, the call at {step}"
        if ahead == 1 + int(self._run.optimizer.delayed):
            raise Overloaded(told, _STEP_S)
        if not 0 <= ahead <= int(self._run.optimizer.delayed):
            raise Refused(told)
        return self._place.served

    # --- what is computed, for whoever asks -------------------------------------------------------------------

    async def output(
        self,
        peer: PeerId,
        step: int | None,
        x_frame: TensorFrame,
        line_bytes_per_s: float = 0.0,
        keep_graph: bool = False,
        trainer: str = "",
    ) -> Made:
        """The stage's output for an input that `peer` sent; `keep_graph`: for the backward, where that saves time.

        `trainer`: whose microbatch it is, if not `peer`'s own. Step None: an evaluation.
        """
        served = self.stage_at(step)
        async with self._present(trainer or peer.text, step):
            (x,) = await self.boundary.decode(peer, [x_frame], "the input")
            if len(x_frame.payload) > x.nbytes + HELD_PADDING_BYTES // 2:
                raise ProtocolViolation(f"the input's frame has {len(x_frame.payload)} bytes, it {x.nbytes}", peer)
            outcome = await self.compute(peer, lambda: served.forward(step, x, keep_graph), "forward")
            return await self._coded(outcome, "output", line_bytes_per_s)

    async def output_again(self, step: int, mb: Mb, line_bytes_per_s: float = 0.0) -> Made:
        """The stage's output for a microbatch whose backward was made here; Refused when it is not kept."""
        served = self.stage_at(step)
        async with self._present(mb.trainer, step):
            outcome = await self._work(lambda: served.output_again(step, mb), "forward")
            return await self._coded(outcome, "output", line_bytes_per_s)

    async def gradient(
        self,
        peer: PeerId,
        step: int,
        mb: Mb,
        frames: Sequence[TensorFrame],
        admitted: Iterable[int] = (),
        line_bytes_per_s: float = 0.0,
        graph: KeptGraph | None = None,
    ) -> Made:
        """The gradient of the input, once the microbatch counts here. `frames`: the input; the output's gradient, or
        the targets. `admitted`: the trainer's numbers that count. `graph`: of the output. A repeat gets what was kept.
        """
        served = self.stage_at(step)
        self.need_a_microbatch(peer, frames)
        async with self._present(mb.trainer, step, backward=True):
            x, target = await self.boundary.decode(peer, frames, "the input", "the output's gradient or the targets")
            self.refuse_when_closing(step)  # once more: nothing may come in between now and the device's queue

            def backward() -> StageOutcome:
                served.make_room(step, mb, admitted)
                return served.backward(step, mb, (x, target), frames, graph)

            outcome = await self.compute(peer, backward, "backward")
            self.samples += self._run.pipeline.microbatch
            self.load.worked(1.0, 0.0)
            return await self._coded(outcome, "input gradient", line_bytes_per_s)

    @asynccontextmanager
    async def _present(self, trainer: str, step: int | None, *, backward: bool = False) -> AsyncIterator[None]:
        """A place among the calls with decoded tensors; who waits for one counts as this peer's load.

        Step None: an evaluation. Overloaded where the call's tensors do not fit into memory now.
        """
        cost = BACKWARD_COST if backward else 1.0
        turn = Turn(self._user_of(trainer), step or 0, backward, step is None, cost)
        self.load.came(trio.current_time())
        try:
            async with self.boundary.room.place(turn):
                self._refuse_without_memory()
                yield
        finally:
            self.load.went(trio.current_time())

    def _user_of(self, trainer: str) -> User:
        """The trainer and where it is linked from; one without a link to us is its own network."""
        link = self._links.best(PeerId.parse(trainer))
        return User(trainer, trainer, trainer) if link is None else link.user

    def _refuse_without_memory(self) -> None:
        """Overloaded where computing one more microbatch would take more memory than is left, while other calls and
        what is kept of them take some: that comes back.
        """
        if self.kept_bytes and (lack := lacking_for_call(self._run, self._place.served.activation_bytes)) is not None:
            self._tell_of_memory(lack)
            raise Overloaded(f"no memory is left for a microbatch: {lack}", _NO_MEMORY_S)

    async def check_targets(self, peer: PeerId, step: int, frame: TensorFrame) -> None:
        """ProtocolViolation of `peer` where these are no targets, which another stage will need."""
        await self.boundary.examine(peer, frame, "the targets", self.stage_at(step).check_targets)

    async def kept_gradient(self, step: int, mb: Mb, line_bytes_per_s: float = 0.0) -> Made:
        """The gradient of the input of a microbatch whose backward was made here; Refused when it is not kept."""
        outcome = self.stage_at(step).found(step, mb)
        if outcome is None:
            raise Refused("the microbatch is not kept here")
        return await self._coded(outcome, "input gradient", line_bytes_per_s)

    async def _coded(self, outcome: StageOutcome, what: str, line_bytes_per_s: float) -> Made:
        frames = await self.boundary.encode(outcome, f"the {what} of stage {self._place.stage}", line_bytes_per_s)
        return Made(outcome.loss_sum, outcome.seconds, frames, outcome.graph)

    async def _work(self, job: Callable[[], StageOutcome], name: str) -> StageOutcome:
        try:
            outcome = await self._worker.run(job, name=name)
        except Stale as error:
            raise Refused(str(error)) from None
        except NoMemory as error:
            self._tell_of_memory(str(error))
            raise Overloaded(f"no memory is left for a microbatch's {name}", _NO_MEMORY_S) from None
        except ResultNotFinite as error:
            self._tell_of_values(str(error))
            raise NotFiniteHere(f"stage {self._place.stage}: {error}") from None
        self._busy_s += outcome.seconds
        self.load.worked(0.0, outcome.seconds)
        return outcome

    def _tell_of_memory(self, reason: str) -> None:
        """Now and then a line for the user: callers find another peer, or wait."""
        now = trio.current_time()
        if now >= self._told_again_at:
            self._told_again_at = now + _TELL_EVERY_S
            self._log.event("stage.no_memory", level="warning", stage=self._place.stage, reason=reason)

    def _tell_of_values(self, reason: str) -> None:
        """One line for the user at the first microbatch of each step; a caller may repeat the others."""
        step = self._place.step
        level = "warning" if step != self._not_finite_at else "debug"
        self._not_finite_at = step
        self._log.event("stage.not_finite", level=level, stage=self._place.stage, step=step, reason=reason)

    async def compute(self, peer: PeerId, job: Callable[[], StageOutcome], name: str) -> StageOutcome:
        """Run a job with tensors of `peer`; ProtocolViolation of that peer when they are wrong."""
        try:
            return await self._work(job, name)
        except ValueError as error:
            raise ProtocolViolation(str(error), peer) from None

    # --- a trainer's calls ------------------------------------------------------------------------------------

    def forward_objection(self, peer: PeerId, body: StageForward) -> PeerdError | None:
        """The reason that no output is computed for a call, by its body alone; None: it is."""
        try:
            self.stage_at(body.step)
            self.refuse_when_leaving()
        except (Refused, Overloaded) as error:
            return error
        if body.step is None:
            return self._place.admissions.evaluation_objection(peer, self._place.step, body.grant)
        return self._place.admissions.objection(peer, body.step, body.seq, body.grant)

    def loss_objection(self, peer: PeerId, body: StageLoss) -> PeerdError | None:
        """The reason that no loss is computed for a call, by its body alone; None: it is."""
        return self._place.admissions.evaluation_objection(peer, self._place.step, body.grant)

    async def forward(self, call: Incoming[StageForward]) -> Answer[StageAnswer]:
        """The stage's output for an input."""
        body = call.body
        self.refuse_when_leaving()
        _need_frames(call, 1)
        if body.step is not None:
            self.need_a_microbatch(call.peer, call.frames)
        return self._answer(call, await self.output(call.peer, body.step, call.frames[0], body.line_bytes_per_s))

    async def loss(self, call: Incoming[StageLoss]) -> Answer[StageAnswer]:
        """The loss of inputs and targets, at the last stage."""
        served = self.stage_at(None)
        async with self._present(call.peer.text, None):
            x, targets = await self.boundary.decode(call.peer, call.frames, "the input", "the targets")
            outcome = await self.compute(call.peer, lambda: served.loss(x, targets), "loss")
        return self._answer(call, Made(outcome.loss_sum, outcome.seconds, ()))

    def objection(self, peer: PeerId, body: StageBackward) -> PeerdError | None:
        """The reason that a microbatch is not taken, by the call's body alone, its grant with it; None: it is taken."""
        try:
            self.stage_at(body.step)
            self.refuse_when_closing(body.step)
            self.refuse_when_leaving()
        except (Refused, Overloaded) as error:
            return error
        return self._place.admissions.objection(peer, body.step, body.seq, body.grant)

    async def backward(self, call: Incoming[StageBackward]) -> Answer[StageAnswer]:
        """The backward of a microbatch: its gradient counts here, and the input's goes back."""
        body, mb = call.body, Mb(call.peer.text, call.body.seq)
        admitted = body.grant.seqs if body.grant is not None else ()
        made = await self.gradient(call.peer, body.step, mb, call.frames, admitted, body.line_bytes_per_s)
        answer = self._answer(call, made)
        return Answer(structs.replace(answer.body, receipt=self._place.receipt(body.step, mb)), answer.frames)

    def _answer(self, call: Incoming[Any], made: Made) -> Answer[StageAnswer]:
        arrival = self._arrival_rate(call.peer) or 0.0
        return Answer(StageAnswer(made.loss_sum, made.service_s, arrival), made.frames)

    def need_a_microbatch(self, peer: PeerId, frames: Sequence[TensorFrame]) -> None:
        """ProtocolViolation for another number of samples than a microbatch has: a step divides by that number."""
        due = self._run.pipeline.microbatch
        if any(frame.shape[:1] != (due,) for frame in frames):
            raise ProtocolViolation(f"a microbatch has {due} samples, these frames another number", peer)

    def refuse_when_closing(self, step: int) -> None:
        if (self.closing or self.spared_at == self._place.step) and step <= self._place.step:
            raise Refused("the stage is averaging")

    def refuse_when_leaving(self) -> None:
        """A leaving peer takes nothing new, unless it is the last of its stage."""
        if self._place.relieved:
            raise Refused("this peer is leaving")


def _need_frames(call: Incoming[Any], count: int) -> None:
    if len(call.frames) != count:
        raise ProtocolViolation(f"the call has {len(call.frames)} frames; expected {count}", call.peer)
