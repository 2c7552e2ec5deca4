"""A member's part in its stage's averaging rounds: plan, residual, sum, and what it says of its line meanwhile."""

from __future__ import annotations

from peerd.compute.choice import Plan
from peerd.compute.feedback import ErrorFeedback
from peerd.compute.served import Vector
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.runfile import RunFile
from peerd.core.training import LineInfo, Prepare
from peerd.core.work import Worker
from peerd.member.lines import own_line
from peerd.role import AveragingPlan, Training


class Rounds:
    """Coding and sums run on `worker`; one round at a time."""

    def __init__(self, run: RunFile, training: Training, worker: Worker) -> None:
        self._run = run
        self._averaging = training.averaging()
        self._worker = worker
        code = run.averaging.code
        self._feedback = ErrorFeedback(Plan(code, run.averaging.block)) if code != "none" else None
        self._vector_is = (0, "")  # elements and dtype of the gradient, once there was one: helpers must know
        self._told = 0

    def line(self) -> LineInfo:
        """What the conductor should know of our line and of what we bring."""
        return own_line(self._run.limits, "node", *self._vector_is)

    def plan(self, order: Prepare, sender: PeerId) -> AveragingPlan:
        """The round that `sender` orders; ProtocolViolation when it does not fit together."""
        averaging = self._run.averaging
        try:
            return AveragingPlan.of(order, averaging.part_bytes, averaging.sender_timeout_s)
        except ValueError as error:
            raise ProtocolViolation(str(error), sender) from None

    async def total(self, plan: AveragingPlan, vector: Vector) -> Vector:
        """The sum of all members' gradients; raises RoundFailed. `vector` is ours, and may be changed."""
        feedback, self._vector_is = self._feedback, (len(vector), vector.dtype.name)
        if feedback is not None:
            await self._worker.run(lambda: feedback.begin(vector), name="add the residual")
        return await self._averaging.sum(plan, vector, self._worker, feedback)

    def settle(self) -> None:
        """The step with the last total was made."""
        if self._feedback is not None:
            self._feedback.settle()

    def forget(self) -> None:
        """The parameters are no longer those that the residual was meant for."""
        if self._feedback is not None:
            self._feedback.forget()

    def newly_aggregated_bytes(self) -> int:
        """Of others' gradients, summed here since the last call."""
        before, self._told = self._told, self._averaging.aggregated_bytes
        return self._told - before
