"""Serving of a stage: outputs, losses and gradients, with the current parameters and for the current step.

Trainers call it for evaluations, and the hand-over of microbatches (`handover`) computes with the same methods. It only
computes: the post decides which microbatches a step counts and when parameters change.

Invariants: every call names its run and stage, and a microbatch its step; it is refused at any other step (in a delayed
run the next step is allowed as well). A step that is being averaged accepts nothing new, nor does a leaving peer. Every
call needs a grant: for a microbatch that a conductor has admitted, or for the one trainer that evaluates. Only one
call's tensors are computed at a time, and none that would not fit into the remaining memory. A hostile trainer may send
wrong frames, shapes, values and steps, microbatches that were not admitted, and any number of calls. Faults that the
body or the frames' headers show are refused before the frames are received; `FairTurns` orders the calls; protocol
errors name the caller. A result of this peer that is not finite is never sent: the caller gets NotFiniteHere and
decides whether another peer of this stage computes the microbatch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.errors import NoMemory, NotFiniteHere, Overloaded, PeerdError, ProtocolViolation, Refused
from peerd.core.ids import PeerId
from peerd.core.limits import HELD_PADDING_BYTES
from peerd.messages.swarm import Mb, StageAnswer, StageForward, StageLoss
from peerd.model.stage.footprint import lacking_for_call
from peerd.model.stage.kept_graph import KeptGraph
from peerd.model.stage.microbatch_books import StageOutcome, Stale
from peerd.model.stage.served_stage import ServedStage
from peerd.model.stage.stage_module import ResultNotFinite
from peerd.pipeline.routes.fair_turns import Turn
from peerd.pipeline.routes.wiring import BACKWARD_COST
from peerd.pipeline.stage.admissions import Admissions
from peerd.pipeline.stage.boundary import Boundary
from peerd.role.role import RoleContext
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import RunFile
from peerd.swarm.rebalance.loads import LoadMeter
from peerd.wire.budget.book import User

_STEP_S: Final = 0.05  # within which a commit that others have made usually arrives here
_NO_MEMORY_S: Final = 1.0  # retry delay for a microbatch that found no memory
_TELL_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result computed for a microbatch. `frames` has the output or the input's gradient, if there is one."""

    loss_sum: float  # over the samples, of the last stage's backward
    service_s: float  # of computing
    frames: tuple[TensorFrame, ...]
    graph: KeptGraph | None = None  # of an output, if kept for the backward pass


class StagePlace(Protocol):
    """What `ServingCalls` needs from its post."""

    stage: int
    admissions: Admissions

    @property
    def step(self) -> int:
        """The step of the parameters."""
        ...

    @property
    def served(self) -> ServedStage: ...

    @property
    def relieved(self) -> bool:
        """True if this peer is leaving the post and other peers of the stage are ready."""
        ...


class ServingCalls:
    """Answers `forward` and `loss` calls, and computes for the hand-over, once `boundary` runs.

    `closing` is True while the sum of the current step is averaged.
    """

    def __init__(self, ctx: RoleContext, run: RunFile, place: StagePlace) -> None:
        self._run, self._place = run, place
        self._worker, self._arrival_rate, self._log = ctx.worker(ctx.device), ctx.rpc.arrival_rate, ctx.log
        self._links = ctx.host.links
        self._told_again_at = float("-inf")  # next time to log a lack of memory
        self._not_finite_at = -1  # the step of the last logged result that was not finite
        self.boundary = Boundary(ctx, run)
        self.closing = False
        self.spared_at = -1  # the step whose remaining microbatches other peers of the stage compute
        self.samples = 0
        self.load = LoadMeter(trio.current_time())
        self._busy_s = 0.0

    def rate(self) -> float:
        """Samples per second of computing: the rate of this device if it were never idle."""
        return self.samples / self._busy_s if self._busy_s else 0.0

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the microbatches that count here."""
        return self._place.served.kept_bytes

    def worked(self, samples: int, seconds: float) -> None:
        """Count work that this peer's own trainer has computed, not through calls."""
        self.samples += samples
        self._busy_s += seconds
        self.load.worked(samples / self._run.pipeline.microbatch, seconds)

    def stage_at(self, step: int | None) -> ServedStage:
        """The stage, if it is at `step` (in a delayed run, also one step before); `step` None accepts any step.

        Raises Overloaded if the stage is about to reach `step`, so that a caller that learned of the commit first
        retries soon, and Refused otherwise.
        """
        ahead = 0 if step is None else step - self._place.step
        told = f"the stage is at step {self._place.step}, the call at {step}"
        if ahead == 1 + int(self._run.optimizer.delayed):
            raise Overloaded(told, _STEP_S)
        if not 0 <= ahead <= int(self._run.optimizer.delayed):
            raise Refused(told)
        return self._place.served

    # --- computation, for all kinds of calls ------------------------------------------------------------------

    async def output(
        self,
        peer: PeerId,
        step: int | None,
        x_frame: TensorFrame,
        line_bytes_per_s: float = 0.0,
        keep_graph: bool = False,
        trainer: str = "",
    ) -> StageResult:
        """The stage's output for an input that `peer` sent. `step` None is an evaluation.

        `keep_graph` keeps the graph for the backward pass, if that saves time. `trainer` owns the microbatch, if it is
        not `peer`.
        """
        served = self.stage_at(step)
        async with self._present(trainer or peer.text, step):
            (x,) = await self.boundary.decode(peer, [x_frame], "the input")
            if len(x_frame.payload) > x.nbytes + HELD_PADDING_BYTES // 2:
                raise ProtocolViolation(f"the input has {x.nbytes} bytes, its frame {len(x_frame.payload)}", peer)
            outcome = await self.compute(peer, lambda: served.forward(step, x, keep_graph), "forward")
            return await self._coded(outcome, "output", line_bytes_per_s)

    async def output_again(self, step: int, mb: Mb, line_bytes_per_s: float = 0.0) -> StageResult:
        """The output for a microbatch whose backward was computed here. Raises Refused if it is not kept."""
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
    ) -> StageResult:
        """Add a microbatch's gradient to the sum and return the gradient of its input. A repeated call gets the kept
        result.

        `frames`: the input, and the output's gradient or (last stage) the targets. `admitted`: all admitted numbers of
        the trainer. `graph`: the kept graph of the output.
        """
        served = self.stage_at(step)
        self.need_a_microbatch(peer, frames)
        async with self._present(mb.trainer, step, backward=True):
            x, target = await self.boundary.decode(peer, frames, "the input", "the output's gradient or the targets")
            self.refuse_when_closing(step)  # again: decoding took time; the device's queue comes next

            def backward() -> StageOutcome:
                served.make_room(step, mb, admitted)
                return served.backward(step, mb, (x, target), frames, graph)

            outcome = await self.compute(peer, backward, "backward")
            self.samples += self._run.pipeline.microbatch
            self.load.worked(1.0, 0.0)
            return await self._coded(outcome, "input gradient", line_bytes_per_s)

    @asynccontextmanager
    async def _present(self, trainer: str, step: int | None, *, backward: bool = False) -> AsyncIterator[None]:
        """Context manager that limits the calls with decoded tensors: waits for a place. Waiting calls count as load.

        `step` None is an evaluation. Raises Overloaded if the call's tensors do not fit into memory now.
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
        """The trainer and its network, for fair turns. A trainer without a link to this peer counts as a network of its
        own.
        """
        link = self._links.best(PeerId.parse(trainer))
        return User(trainer, trainer, trainer) if link is None else link.user

    def _refuse_without_memory(self) -> None:
        """Raise Overloaded if memory does not suffice for one more microbatch while kept results occupy some of it.

        Without kept results there is nothing to wait for, so the call is tried.
        """
        if self.kept_bytes and (lack := lacking_for_call(self._run, self._place.served.activation_bytes)) is not None:
            self._tell_of_memory(lack)
            raise Overloaded(f"no memory is left for a microbatch: {lack}", _NO_MEMORY_S)

    async def check_targets(self, peer: PeerId, step: int, frame: TensorFrame) -> None:
        """Check targets that a later stage will use. Raises ProtocolViolation, which names `peer`, if they are
        wrong.
        """
        await self.boundary.examine(peer, frame, "the targets", self.stage_at(step).check_targets)

    async def kept_gradient(self, step: int, mb: Mb, line_bytes_per_s: float = 0.0) -> StageResult:
        """The input's gradient of a microbatch whose backward was computed here. Raises Refused if it is not kept."""
        outcome = self.stage_at(step).found(step, mb)
        if outcome is None:
            raise Refused("the microbatch is not kept here")
        return await self._coded(outcome, "input gradient", line_bytes_per_s)

    async def _coded(self, outcome: StageOutcome, what: str, line_bytes_per_s: float) -> StageResult:
        frames = await self.boundary.encode(outcome, f"the {what} of stage {self._place.stage}", line_bytes_per_s)
        return StageResult(outcome.loss_sum, outcome.seconds, frames, outcome.graph)

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
        """Log the lack of memory at most once a minute; callers find another peer or wait."""
        now = trio.current_time()
        if now >= self._told_again_at:
            self._told_again_at = now + _TELL_EVERY_S
            self._log.event("stage.no_memory", level="warning", stage=self._place.stage, reason=reason)

    def _tell_of_values(self, reason: str) -> None:
        """Log a result that is not finite: the first one of each step as a warning, since callers may repeat them."""
        step = self._place.step
        level = "warning" if step != self._not_finite_at else "debug"
        self._not_finite_at = step
        self._log.event("stage.not_finite", level=level, stage=self._place.stage, step=step, reason=reason)

    async def compute(self, peer: PeerId, job: Callable[[], StageOutcome], name: str) -> StageOutcome:
        """Run a job on tensors of `peer`. Raises ProtocolViolation, which names the peer, if the tensors are wrong."""
        try:
            return await self._work(job, name)
        except ValueError as error:
            raise ProtocolViolation(str(error), peer) from None

    # --- a trainer's evaluations ------------------------------------------------------------------------------

    def forward_objection(self, peer: PeerId, body: StageForward) -> PeerdError | None:
        """Reason to reject a forward call, from its body alone, or None."""
        try:
            self.refuse_when_leaving()
        except Refused as error:
            return error
        return self._place.admissions.evaluation_objection(peer, self._place.step, body.grant)

    def loss_objection(self, peer: PeerId, body: StageLoss) -> PeerdError | None:
        """Reason to reject a loss call, from its body alone, or None."""
        return self._place.admissions.evaluation_objection(peer, self._place.step, body.grant)

    async def forward(self, call: Incoming[StageForward]) -> Answer[StageAnswer]:
        """The stage's output for an input."""
        self.refuse_when_leaving()
        if len(call.frames) != 1:
            raise ProtocolViolation(f"the call has {len(call.frames)} frames; expected 1", call.peer)
        return self._answer(call, await self.output(call.peer, None, call.frames[0], call.body.line_bytes_per_s))

    async def loss(self, call: Incoming[StageLoss]) -> Answer[StageAnswer]:
        """The loss of inputs and targets, at the last stage."""
        served = self.stage_at(None)
        async with self._present(call.peer.text, None):
            x, targets = await self.boundary.decode(call.peer, call.frames, "the input", "the targets")
            outcome = await self.compute(call.peer, lambda: served.loss(x, targets), "loss")
        return self._answer(call, StageResult(outcome.loss_sum, outcome.seconds, ()))

    def _answer(self, call: Incoming[Any], made: StageResult) -> Answer[StageAnswer]:
        arrival = self._arrival_rate(call.peer) or 0.0
        return Answer(StageAnswer(made.loss_sum, made.service_s, arrival), made.frames)

    def need_a_microbatch(self, peer: PeerId, frames: Sequence[TensorFrame]) -> None:
        """Raise ProtocolViolation unless the frames have a microbatch's number of samples: a step divides by that
        number.
        """
        due = self._run.pipeline.microbatch
        if any(frame.shape[:1] != (due,) for frame in frames):
            raise ProtocolViolation(f"a microbatch has {due} samples; these frames have another number", peer)

    def refuse_when_closing(self, step: int) -> None:
        if (self.closing or self.spared_at == self._place.step) and step <= self._place.step:
            raise Refused("the stage is averaging")

    def refuse_when_leaving(self) -> None:
        """Raise Refused if this peer is leaving and others of its stage are ready; the last peer of a stage accepts new
        work.
        """
        if self._place.relieved:
            raise Refused("this peer is leaving")
