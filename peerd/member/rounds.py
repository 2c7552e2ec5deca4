"""A member's part in its stage's averaging rounds: plan, residual, sums, and what it says of its line meanwhile.

What a round leaves behind counts once the step with its total is made (`Total.settle`), and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from peerd.compute.feedback import feedback_of
from peerd.compute.powersgd import LowRank
from peerd.compute.served import Model, Vector
from peerd.core.errors import ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.runfile import RunFile
from peerd.core.training import LineInfo, Prepare
from peerd.core.work import Worker
from peerd.member.lines import own_line
from peerd.role import AveragingPlan, RoundFailed, Training


@dataclass(frozen=True, slots=True)
class Total:
    """What a round gives: the sum of all members' gradients, and what is to be done once the step with it is made."""

    vector: Vector
    settle: Callable[[], None]

    def commit(self, model: Model, step: int, samples: int) -> None:
        """Make the step: a job for the model's worker, so that nobody sees one without the other."""
        model.commit(step, self.vector, samples)
        self.settle()


class Rounds:
    """Coding and sums run on `worker`; one round at a time."""

    def __init__(self, run: RunFile, training: Training, worker: Worker, own: PeerId) -> None:
        self._run = run
        self._averaging = training.averaging()
        self._worker = worker
        self._own = own.text
        self._feedback = feedback_of(run.averaging)
        self._vector_is = (0, "", 0)  # elements and dtype of what we bring, once we did: helpers must know
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

    async def total(self, plan: AveragingPlan, vector: Vector, low_rank: LowRank | None = None) -> Total:
        """The sum of all members' gradients; raises RoundFailed. `vector` is ours, and may be changed."""
        if low_rank is not None:
            return await self._of_factors(plan, vector, low_rank)
        feedback, self._vector_is = self._feedback, (len(vector), vector.dtype.name, 0)
        if feedback is None:
            return Total(await self._averaging.sum(plan, vector, self._worker), lambda: None)
        new = await self._worker.run(lambda: feedback.begin(vector), name="add the residual")
        total = await self._averaging.sum(plan, vector, self._worker, feedback)
        return Total(total, lambda: feedback.settle(new))

    async def _of_factors(self, plan: AveragingPlan, vector: Vector, code: LowRank) -> Total:
        """Two sums, the second of what the first one led to."""
        first_elements, further = code.elements
        self._vector_is = (first_elements, vector.dtype.name, further)
        if plan.length and plan.further != further:
            raise RoundFailed("the round is planned for vectors of another size", (self._own,))
        work, averaging = self._worker, self._averaging
        if len(plan.group) == 1:
            ready = await work.run(lambda: code.alone(vector), name="add the residual")
        else:
            ours = await work.run(lambda: code.begin(vector), name="make the first factors")
            first = await averaging.sum(plan, ours, work)
            second = await work.run(lambda: code.project(first), name="make the second factors")
            if further:
                second = await averaging.sum(plan.second(), second, work)
            ready = await work.run(lambda: code.finish(second), name="multiply the factors")
        return Total(ready.total, lambda: code.settle(ready))

    def forget(self) -> None:
        """The parameters are no longer those that the residual was meant for."""
        if self._feedback is not None:
            self._feedback.forget()

    def told(self) -> dict[str, object]:
        """How rounds ended, for status."""
        return self._averaging.outcomes.told()

    def newly_aggregated_bytes(self) -> int:
        """Of others' gradients, summed here since the last call."""
        before, self._told = self._told, self._averaging.aggregated_bytes
        return self._told - before
