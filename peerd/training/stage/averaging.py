"""A member's part in its stage's averaging rounds: plan, residual, sums, and the line it declares for the next plan.

A round's residual is settled once the step with its total is made (`Total.settle`), and not before. An attempt ends
when it is made, its conductor hangs up, a later one is ordered, or another conductor is followed: a conductor that
hangs, or is gone without a word, does not block the member.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import trio

from peerd.compute.codec.error_feedback import ErrorFeedback, Missed, feedback_of
from peerd.compute.codec.powersgd import LowRank
from peerd.compute.model.served_stage import Model, Vector
from peerd.core.blockwise import BLOCKS, CODES
from peerd.core.errors import ConfigError, ProtocolViolation, Refused
from peerd.core.frame import DTYPES
from peerd.core.ids import PeerId
from peerd.core.limits import AVERAGE_PARTS, FRAME_ELEMENTS
from peerd.core.messages.swarm import LineInfo, Position, Prepare
from peerd.core.run.runfile import RunFile
from peerd.core.work import Worker
from peerd.machine.averaging.allreduce import AveragingPlan, RoundFailed
from peerd.machine.averaging.member_plan import Terms, plans_of
from peerd.service.run_services import RunServices
from peerd.training.catchup.step_totals import Leap
from peerd.training.stage.line_info import own_line

Plans = Sequence[AveragingPlan]  # of the rounds of one attempt, one after the other


@dataclass(frozen=True, slots=True)
class Total:
    """A round's result: the sum of all members' gradients. `settle` keeps its residual once the step is made."""

    vector: Vector
    settle: Callable[[], None]
    also: Sequence[Vector] = ()  # vectors that all members keep of the round beside the sum

    def digest(self) -> bytes:
        """SHA-256 of the vectors that all members of the stage must have alike; RoundFailed when the sum is not finite.

        For the coding worker.
        """
        if not np.isfinite(self.vector).all():
            raise RoundFailed("the sum is not finite", ())
        found = hashlib.sha256()
        for vector in (self.vector, *self.also):
            found.update(np.ascontiguousarray(vector).data.cast("B"))
        return found.digest()

    def commit(self, model: Model, step: int, samples: int) -> None:
        """Make the step and settle: one job of the model's worker, so that no other job comes in between."""
        model.commit(step, self.vector, samples)
        self.settle()

    def step(self, model: Model, target: Position, samples: int) -> Leap:
        """Make the step to `target`; returns the leap that others make it by. For the model's worker."""
        self.commit(model, target.step - 1, samples)
        return Leap.made(model, target, self.vector)


_LONG_S = 10.0  # a round that takes longer is reported as waiting


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The attempt under way."""

    name: bytes
    conductor: PeerId
    since: float
    scope: trio.CancelScope


class Rounds:
    """A member's averaging rounds, one at a time; coding and sums run on `worker`."""

    def __init__(self, run: RunFile, services: RunServices, worker: Worker, own: PeerId) -> None:
        self._run = run
        self._services, self._averaging = services, services.averaging
        self._worker = worker
        self._own = own.text
        self._feedback, self._forgetful = feedback_of(run.averaging), feedback_of(run.averaging)
        align = max(BLOCKS) if run.averaging.code in CODES else 1
        self._terms = Terms(run.averaging.part_bytes, run.averaging.sender_timeout_s, align)
        self._vector_is = (0, "", 0)  # elements, dtype and further of our vector, once there was one: helpers must know
        self._attempt: _Attempt | None = None

    @property
    def waits_for(self) -> str | None:
        """Text that says what a long round waits for, and its progress; None while no round takes long."""
        seconds = trio.current_time() - self._attempt.since if self._attempt is not None else 0.0
        if seconds <= _LONG_S:
            return None
        done_bytes, total_bytes = self._averaging.progress()
        told = "the gradients of its stage-mates"
        if not total_bytes:
            return told
        told += f": {done_bytes / 1e6:.1f} of {total_bytes / 1e6:.1f} MB"
        if not done_bytes:
            return told
        return f"{told}, {done_bytes / seconds / 1e6:.2f} MB/s, {seconds * (total_bytes / done_bytes - 1):.0f} s left"

    @contextmanager
    def under_way(self, attempt: bytes, conductor: PeerId) -> Iterator[None]:
        """The scope of an attempt's rounds; Refused when the attempt is called off."""
        with trio.CancelScope() as scope:
            self._attempt = _Attempt(attempt, conductor, trio.current_time(), scope)
            try:
                yield
            finally:
                self._attempt = None
        if scope.cancelled_caught:
            raise Refused("the attempt was called off: another one was ordered, or this peer follows another conductor")

    def call_off_for(self, attempt: bytes) -> None:
        """Call off another attempt under way: the conductor gave it up when it ordered this one."""
        if self._attempt is not None and self._attempt.name != attempt:
            self._attempt.scope.cancel()

    def call_off_unless_of(self, conductor: PeerId | None) -> None:
        """Call off an attempt of another conductor than this one: it will never be committed."""
        if self._attempt is not None and self._attempt.conductor != conductor:
            self._attempt.scope.cancel()

    def check(self, model: Model) -> None:
        """Take note of the size of the model's gradient; ConfigError when rounds cannot carry it: later, the run would
        only stall.
        """
        outline, code = model.vector_outline(), model.low_rank
        elements = max(code.elements) if code is not None else math.prod(outline.shape)
        if elements > FRAME_ELEMENTS:
            least = "cut the model into more stages (pipeline.stages)"
            raise ConfigError(f"a stage's gradient has {elements} values; allowed: up to {FRAME_ELEMENTS}: {least}")
        least_bytes = elements * DTYPES[outline.dtype].itemsize // (AVERAGE_PARTS // 2)
        if self._terms.part_bytes < least_bytes:
            told = f"averaging.part_bytes is {self._terms.part_bytes}"
            raise ConfigError(f"{told}; allowed for a gradient of {elements} values: {least_bytes} and more")
        first, further = code.elements if code is not None else (elements, 0)
        self._vector_is = first, outline.dtype, further  # the conductor allows a round time for it

    def line(self) -> LineInfo:
        """Our line, and the size of our vector, for the conductor to divide rounds by."""
        return own_line(self._services.carries(), "node", *self._vector_is)

    def plans(self, order: Prepare, sender: PeerId) -> tuple[AveragingPlan, ...]:
        """The rounds that `sender` orders us to make; ProtocolViolation when they do not fit together."""
        try:
            return plans_of(order, self._own, self._terms)
        except ValueError as error:
            raise ProtocolViolation(str(error), sender) from None

    async def total(self, plans: Sequence[AveragingPlan], vector: Vector, low_rank: LowRank | None = None) -> Total:
        """The sum of all members' gradients; raises RoundFailed. `vector` is ours, and stays as it is."""
        if low_rank is not None:
            return await self._of_factors(plans, vector, low_rank)
        feedback, self._vector_is = self._feedback, (len(vector), vector.dtype.name, 0)
        if feedback is None:
            return Total(await self._sum(plans, vector), lambda: None)

        def begin() -> tuple[Vector, Missed]:
            ours = vector.copy() if feedback.residual is not None else vector
            return ours, feedback.begin(ours)

        ours, new = await self._worker.run(begin, name="add the residual")
        total = await self._sum(plans, ours)
        return Total(total, lambda: feedback.settle(new))

    async def _sum(self, plans: Sequence[AveragingPlan], vector: Vector) -> Vector:
        """One sum, over all rounds. Of groups that make the same sum, one keeps the residual of its code."""

        def coder(plan: AveragingPlan) -> ErrorFeedback | None:
            return self._forgetful if plan.copy else self._feedback

        return await self._averaging.sum_over(plans, vector, self._worker, coder)

    async def _of_factors(self, plans: Sequence[AveragingPlan], vector: Vector, code: LowRank) -> Total:
        """The sum by PowerSGD's factors: two sums, the second of a projection on the first."""
        first_elements, further = code.elements
        self._vector_is = (first_elements, vector.dtype.name, further)
        if any(plan.length and plan.further != further for plan in plans):
            raise RoundFailed("the round is planned for vectors of another size", (self._own,))
        work, after = self._worker, [plan.second() for plan in plans]
        if all(len(plan.group) == 1 for plan in plans):
            ready = await work.run(lambda: code.alone(vector), name="add the residual")
        else:
            with self._averaging.expecting(plan.attempt for plan in (*plans, *after)):
                ours = await work.run(lambda: code.begin(vector), name="make the first factors")
                first = await self._sum(plans, ours)
                second = await work.run(lambda: code.project(first), name="make the second factors")
                if further:
                    second = await self._sum(after, second)
            ready = await work.run(lambda: code.finish(second), name="multiply the factors")
        return Total(ready.total, lambda: code.settle(ready), ready.rights or ())

    async def digest(self, total: Total) -> bytes:
        """See `Total.digest`."""
        return await self._worker.run(total.digest, name="digest the sum")

    def forget(self) -> None:
        """Drop the residual: the parameters are no longer those that it was meant for."""
        if self._feedback is not None:
            self._feedback.forget()

    def told(self) -> dict[str, object]:
        """Outcomes of rounds, for status."""
        return self._averaging.outcomes.told()
