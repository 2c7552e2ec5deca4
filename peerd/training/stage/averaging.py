"""A member's part in its stage's averaging rounds: plan, residual, sums, and the line it declares for the next plan.

A sum that is not that of the batch yet is kept until a later order has the member bring it: so a group that fails costs
no other group its sum. A round's residual is settled once the step with its total is made (`Total.settle`), and not
before. An attempt ends when it is made, its conductor hangs up, a later one is ordered, or another conductor is
followed: a conductor that hangs, or is gone without a word, does not block the member.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import trio

from peerd.compute.codec.error_feedback import Missed, feedback_of
from peerd.compute.codec.powersgd import PowerSgd
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
from peerd.machine.averaging.member_plan import MemberTerms, plan_of
from peerd.service.run_services import RunServices
from peerd.training.catchup.step_totals import StepTotal
from peerd.training.stage.line_info import own_line


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

    def step(self, model: Model, target: Position, samples: int) -> StepTotal:
        """Make the step to `target`; returns the leap that others make it by. For the model's worker."""
        self.commit(model, target.step - 1, samples)
        return StepTotal.made(model, target, self.vector)


@dataclass(slots=True)
class _Sum:
    """A vector, brought or summed, and what the rounds that led to it missed by their code. `own`: our gradient is in
    it, and our residual with that.
    """

    vector: Vector
    missed: tuple[Missed, ...] = ()
    own: bool = False

    def fold(self) -> None:
        """Make one of what all rounds so far missed: else each further round would keep one more vector."""
        if len(self.missed) > 1:
            first, *others = self.missed
            first.folded(others)
            self.missed = (first,)


class SumAbsent(RoundFailed):
    """The sum that this peer is to bring is not here."""


_LONG_S = 10.0  # a round that takes longer is reported as waiting


@dataclass(frozen=True, slots=True)
class _Attempt:
    """An attempt under way; `helps`: the peer only sums for others in it."""

    name: bytes
    conductor: PeerId
    since: float
    scope: trio.CancelScope
    helps: bool


class AveragingRounds:
    """A member's averaging rounds, one at a time beside those in which it helps; coding and sums run on `worker`."""

    def __init__(self, run: RunFile, services: RunServices, worker: Worker, own: PeerId) -> None:
        self._run = run
        self._services, self._averaging = services, services.averaging
        self._worker = worker
        self._own = own.text
        self._feedback, self._forgetful = feedback_of(run.averaging), feedback_of(run.averaging)
        align = max(BLOCKS) if run.averaging.code in CODES else 1
        self._terms = MemberTerms(run.averaging.part_bytes, run.averaging.sender_timeout_s, align)
        self._vector_is = (0, "", 0)  # elements, dtype and further of our vector, once there was one: helpers must know
        self._attempts: list[_Attempt] = []
        self._kept: dict[bytes, _Sum] = {}  # by attempt, the newest last; two at most, whatever is ordered

    @property
    def waits_for(self) -> str | None:
        """Text that says what a long round waits for, and its progress; None while no round takes long."""
        now = trio.current_time()
        seconds = now - min((one.since for one in self._attempts), default=now)
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
    def under_way(self, attempt: bytes, conductor: PeerId, *, helps: bool = False) -> Iterator[None]:
        """The scope of an attempt's rounds; Refused when the attempt is called off. `helps`: we only sum for others."""
        with trio.CancelScope() as scope:
            found = _Attempt(attempt, conductor, trio.current_time(), scope, helps)
            self._attempts.append(found)
            try:
                yield
            finally:
                self._attempts.remove(found)
        if scope.cancelled_caught:
            raise Refused("the attempt was called off: another one was ordered, or this peer follows another conductor")

    def call_off_for(self, attempt: bytes) -> None:
        """Call off another attempt of ours under way: the conductor gave it up when it ordered this one."""
        for one in self._attempts:
            if one.name != attempt and not one.helps:
                one.scope.cancel()

    def call_off_unless_of(self, conductor: PeerId | None) -> None:
        """Call off attempts of another conductor than this one: they will never be committed."""
        for one in self._attempts:
            if one.conductor != conductor:
                one.scope.cancel()

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

    def plan(self, order: Prepare, sender: PeerId) -> AveragingPlan:
        """The round that `sender` orders us to make; ProtocolViolation when it does not fit together."""
        try:
            return plan_of(order, self._own, self._terms)
        except ValueError as error:
            raise ProtocolViolation(str(error), sender) from None

    def brings_gradient(self, order: Prepare) -> bool:
        """True when the order has us bring our own gradient, and not a sum that we have."""
        return order.brings is None and self._own not in order.listeners

    async def total(
        self, order: Prepare, plan: AveragingPlan, vector: Vector | None, low_rank: PowerSgd | None = None
    ) -> Total:
        """The sum of what all senders bring; raises RoundFailed. `vector`: our gradient, where the order has us bring
        it; it stays as it is. The sum is kept for later orders.
        """
        if vector is not None:
            self._kept.clear()
            if order.last and low_rank is not None:
                return await self._of_factors(plan, vector, low_rank)
        brought = await self._brought(order, plan, vector, low_rank)
        coder = self._forgetful if plan.copy else self._feedback  # of groups with the same sum one keeps the residual
        summed = await self._averaging.sum(plan, brought.vector, self._worker, coder if len(plan.senders) > 1 else None)
        if plan.senders == (self._own,):
            summed = brought.vector  # whatever others made of it
        found = self._kept[order.attempt] = _Sum(summed, brought.missed, brought.own)
        if not order.last:
            return Total(summed, lambda: None)
        if low_rank is not None:
            return await self._of_second(low_rank, summed)
        return Total(summed, lambda: self._settle(found))

    def _settle(self, found: _Sum) -> None:
        """The step with this sum is made. Where we only listened our residual is still to be brought."""
        if self._feedback is None:
            return
        if found.own:
            self._feedback.settle(*found.missed)
        else:
            self._feedback.settle_further(found.missed)

    def keeps(self, attempt: bytes) -> bool:
        """True while the sum that this attempt gave us is here."""
        return attempt in self._kept

    async def _brought(
        self, order: Prepare, plan: AveragingPlan, vector: Vector | None, low_rank: PowerSgd | None
    ) -> _Sum:
        """What we bring, which is what we have as well where we listen."""
        work, feedback = self._worker, self._feedback
        if vector is not None:
            if low_rank is not None:
                return _Sum(await work.run(lambda: low_rank.begin(vector), name="make the first factors"), own=True)
            self._vector_is = (len(vector), vector.dtype.name, 0)
            return await work.run(lambda: self._with_residual(vector), name="add the residual")
        name = order.brings or b""
        kept, listens = self._kept.get(name), self._own in order.listeners
        self._kept = {name: kept} if kept is not None else {}  # the others are of no use, or were called off
        if listens and kept is None:
            elements, dtype, _ = self._vector_is
            kept = _Sum(np.empty(elements, dtype))
        if kept is None:
            raise SumAbsent("the sum that this peer is to bring is not here", ())
        if order.second:
            if low_rank is None:
                raise RoundFailed("this run has no sum of second factors", ())
            return _Sum(await work.run(lambda: low_rank.project(kept.vector), name="make the second factors"))
        if feedback is None or plan.copy or len(plan.senders) == 1:
            return kept
        if len(kept.missed) > 1:
            await work.run(kept.fold, name="add up what the code missed")
        return _Sum(kept.vector, (*kept.missed, feedback.go_on(kept.vector)), kept.own)

    def _with_residual(self, vector: Vector) -> _Sum:
        """Our gradient with what earlier rounds missed of it; a copy where there is a residual to add."""
        feedback = self._feedback
        if feedback is None:
            return _Sum(vector, own=True)
        ours = vector.copy() if feedback.residual is not None else vector
        return _Sum(ours, (feedback.begin(ours),), own=True)

    async def _of_factors(self, plan: AveragingPlan, vector: Vector, code: PowerSgd) -> Total:
        """The sum by PowerSGD's factors: two sums, the second of a projection on the first."""
        first_elements, further = code.elements
        self._vector_is = (first_elements, vector.dtype.name, further)
        if plan.length and plan.further != further:
            raise RoundFailed("the round is planned for vectors of another size", (self._own,))
        work, after = self._worker, plan.second()
        if len(plan.group) == 1:
            ready = await work.run(lambda: code.alone(vector), name="add the residual")
            return Total(ready.total, lambda: code.settle(ready), ready.rights or ())
        with self._averaging.expecting((plan.attempt, after.attempt)):
            ours = await work.run(lambda: code.begin(vector), name="make the first factors")
            first = await self._averaging.sum(plan, ours, work)
            second = await work.run(lambda: code.project(first), name="make the second factors")
            if further:
                second = await self._averaging.sum(after, second, work)
        return await self._of_second(code, second)

    async def _of_second(self, code: PowerSgd, second: Vector) -> Total:
        ready = await self._worker.run(lambda: code.finish(second), name="multiply the factors")
        return Total(ready.total, lambda: code.settle(ready), ready.rights or ())

    def drop_sums(self) -> None:
        """Forget all sums: they are of another position."""
        self._kept.clear()

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
