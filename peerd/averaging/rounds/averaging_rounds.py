"""A member's part in its stage's averaging rounds: plan, residual, sums, and the line rates that it declares.

A partial sum is kept until a later order has the member contribute it, so a group that fails costs no other group its
sum. The residual of a round (what the lossy code dropped) is settled only after the step with its total is made
(`Total.settle`). An attempt ends when it is complete, when its conductor disconnects, or when a later attempt is
ordered or another conductor is followed; so a conductor that hangs or disappears does not block the member.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import trio

from peerd.averaging.allreduce_round import AveragingPlan, MemberTerms, RoundFailed, plan_of
from peerd.averaging.rounds.line_info import own_line
from peerd.codec.error_feedback import RoundResidual, feedback_of
from peerd.codec.format.blockwise import BLOCKS, CODES
from peerd.codec.format.frame import DTYPES
from peerd.codec.powersgd import PowerSgd
from peerd.core.errors import ProtocolViolation, Refused
from peerd.core.ids import PeerId
from peerd.core.work import Worker
from peerd.messages.swarm import LineInfo, Position, Prepare
from peerd.model.shapes.averaged_vector import check_vector
from peerd.model.stage.served_stage import Model, Vector
from peerd.role.run_services import RunServices
from peerd.run.runfile import RunFile
from peerd.state.catchup.copy_room import room_for_residual
from peerd.state.catchup.step_totals import StepTotal
from peerd.state.state_room import StateRoom

log = logging.getLogger("peerd.averaging.rounds.averaging_rounds")


@dataclass(frozen=True, slots=True)
class Total:
    """A round's result: the sum of all members' gradients. `settle` commits its residual once the step is made."""

    vector: Vector
    settle: Callable[[], None]
    also: Sequence[Vector] = ()  # further vectors of the round that all members keep

    def digest(self) -> bytes:
        """SHA-256 of the vectors that must be equal at all members of the stage. Runs on the coding worker.

        Raises RoundFailed if the sum is not finite.
        """
        if not np.isfinite(self.vector).all():
            raise RoundFailed("the sum is not finite", ())
        found = hashlib.sha256()
        for vector in (self.vector, *self.also):
            found.update(np.ascontiguousarray(vector).data.cast("B"))
        return found.digest()

    def commit(self, model: Model, step: int, samples: int) -> None:
        """Make the step and settle the residual, as one job of the model's worker, so that no other job runs in
        between.
        """
        model.commit(step, self.vector, samples)
        self.settle()

    def step(self, model: Model, target: Position, samples: int) -> StepTotal:
        """Make the step to `target`; returns the leap (the step with its total) for others. Runs on the model's
        worker.
        """
        self.commit(model, target.step - 1, samples)
        return StepTotal.made(model, target, self.vector)


@dataclass(slots=True)
class _Sum:
    """A vector, contributed or summed, and what the code dropped in the rounds that led to it.

    `own` is True if our gradient, and with it our residual, is in it.
    """

    vector: Vector
    missed: tuple[RoundResidual, ...] = ()
    own: bool = False

    def fold(self) -> None:
        """Merge the dropped parts of all rounds into one vector, because otherwise each round would keep one more."""
        if len(self.missed) > 1:
            first, *others = self.missed
            first.folded(others)
            self.missed = (first,)


class SumAbsent(RoundFailed):
    """This peer does not have the partial sum that it should contribute."""


_LONG_S = 10.0  # a round that takes longer is reported as waiting


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A running attempt. `helps` is True if this peer only sums for others in it."""

    name: bytes
    conductor: PeerId
    since: float
    scope: trio.CancelScope
    helps: bool


class AveragingRounds:
    """A member's averaging rounds: one at a time, besides those in which it only helps. Codes and sums on `worker`."""

    def __init__(
        self, run: RunFile, services: RunServices, worker: Worker, own: PeerId, folder: Path | None = None
    ) -> None:
        """`folder` is for files with large residuals; by default all residuals are in memory."""
        self._run, self._folder = run, folder
        self._services, self._averaging = services, services.averaging
        self._worker = worker
        self._own = own.text
        self._feedback = feedback_of(run.averaging, self._room_for_residual)
        self._forgetful = feedback_of(run.averaging)  # for rounds without a residual
        self._disk_failed = False  # the last residual had to stay in memory
        self._round_s = math.inf  # duration of the last round; inf before the first one
        align = max(BLOCKS) if run.averaging.code in CODES else 1
        self._terms = MemberTerms(run.averaging.part_bytes, run.averaging.sender_timeout_s, align)
        self._vector_is = (0, "", 0)  # elements, dtype and further of our vector, for helpers
        self._attempts: list[_Attempt] = []
        self._kept: dict[bytes, _Sum] = {}  # by attempt, the newest last; at most two

    @property
    def waits_for(self) -> str | None:
        """What a round that takes more than 10 s waits for, with its progress, as text; else None."""
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
        """The scope of an attempt's rounds. Raises Refused if the attempt is cancelled. `helps`: we only sum for
        others.
        """
        with trio.CancelScope() as scope:
            found = _Attempt(attempt, conductor, trio.current_time(), scope, helps)
            self._attempts.append(found)
            try:
                yield
            finally:
                self._attempts.remove(found)
        if scope.cancelled_caught:
            raise Refused("the attempt was cancelled: another one was ordered, or this peer follows another conductor")

    def call_off_for(self, attempt: bytes) -> None:
        """Cancel our other running attempts, because the conductor gave them up when it ordered `attempt`."""
        for one in self._attempts:
            if one.name != attempt and not one.helps:
                one.scope.cancel()

    def call_off_unless_of(self, conductor: PeerId | None) -> None:
        """Cancel attempts of conductors other than `conductor`, because they will never be committed."""
        for one in self._attempts:
            if one.conductor != conductor:
                one.scope.cancel()

    def check(self, model: Model) -> None:
        """Record the size of the model's gradient. Raises ConfigError if rounds cannot carry it; else the run would
        stall later.
        """
        outline, code = model.vector_outline(), model.low_rank
        elements = max(code.elements) if code is not None else math.prod(outline.shape)
        check_vector(self._run.averaging, elements, DTYPES[outline.dtype].itemsize)
        first, further = code.elements if code is not None else (elements, 0)
        self._vector_is = first, outline.dtype, further  # the conductor derives a round's time limit from it

    def line(self) -> LineInfo:
        """Our link rates and the size of our vector, by which the conductor divides rounds."""
        return own_line(self._services.line_speeds(), "node", *self._vector_is)

    def plan(self, order: Prepare, sender: PeerId) -> AveragingPlan:
        """The plan of the round that `sender` orders. Raises ProtocolViolation if the order is inconsistent."""
        try:
            return plan_of(order, self._own, self._terms)
        except ValueError as error:
            raise ProtocolViolation(str(error), sender) from None

    def brings_gradient(self, order: Prepare) -> bool:
        """True if the order has us contribute our own gradient, not a partial sum."""
        return order.brings is None and self._own not in order.listeners

    async def total(
        self, order: Prepare, plan: AveragingPlan, vector: Vector | None, low_rank: PowerSgd | None = None
    ) -> Total:
        """Run the round and return the sum over all senders, which is kept for later orders. Raises RoundFailed.

        `vector` is our gradient, if the order has us contribute it; it is not modified.
        """
        if vector is not None:
            self._kept.clear()
            if order.last and low_rank is not None:
                return await self._of_factors(plan, vector, low_rank)
        brought = await self._brought(order, plan, vector, low_rank)
        coder = self._forgetful if plan.copy else self._feedback  # of groups with the same sum, one keeps the residual
        began = trio.current_time()
        summed = await self._averaging.sum(plan, brought.vector, self._worker, coder if len(plan.senders) > 1 else None)
        if coder is self._feedback and len(plan.senders) > 1:
            self._round_s = trio.current_time() - began
        if plan.senders == (self._own,):
            summed = brought.vector  # our own vector, not a copy that others processed
        found = self._kept[order.attempt] = _Sum(summed, brought.missed, brought.own)
        if not order.last:
            return Total(summed, lambda: None)
        if low_rank is not None:
            return await self._of_second(low_rank, summed)
        return Total(summed, lambda: self._settle(found))

    def _room_for_residual(self, size: int) -> StateRoom | None:
        if self._folder is None:
            return None
        try:
            room = room_for_residual(self._run, self._folder, size, self._round_s)
        except OSError as error:
            level = logging.DEBUG if self._disk_failed else logging.WARNING
            log.log(level, "what the code rounds off stays in memory, %s cannot take it: %s", self._folder, error)
            self._disk_failed = True
            return None
        self._disk_failed = False
        return room

    def _settle(self, found: _Sum) -> None:
        """Settle the residual after the step with this sum. If we only listened, our residual is still to be
        contributed.
        """
        if self._feedback is None:
            return
        if found.own:
            self._feedback.settle(*found.missed)
        else:
            self._feedback.settle_further(found.missed)

    def keeps(self, attempt: bytes) -> bool:
        """True while the sum made by this attempt is kept."""
        return attempt in self._kept

    async def _brought(
        self, order: Prepare, plan: AveragingPlan, vector: Vector | None, low_rank: PowerSgd | None
    ) -> _Sum:
        """The vector that we contribute: our gradient or a kept sum. A listener without a kept sum gets an empty
        buffer.
        """
        work, feedback = self._worker, self._feedback
        if vector is not None:
            if low_rank is not None:
                return _Sum(await work.run(lambda: low_rank.begin(vector), name="make the first factors"), own=True)
            self._vector_is = (len(vector), vector.dtype.name, 0)
            return await work.run(lambda: self._with_residual(vector), name="add the residual")
        name = order.brings or b""
        kept, listens = self._kept.get(name), self._own in order.listeners
        self._kept = {name: kept} if kept is not None else {}  # the others are unused or were cancelled
        if listens and kept is None:
            elements, dtype, _ = self._vector_is
            kept = _Sum(np.empty(elements, dtype))
        if kept is None:
            raise SumAbsent("this peer does not have the sum that it should contribute", ())
        if order.second:
            if low_rank is None:
                raise RoundFailed("this run has no sum of second factors", ())
            return _Sum(await work.run(lambda: low_rank.project(kept.vector), name="make the second factors"))
        if feedback is None or plan.copy or len(plan.senders) == 1:
            return kept
        if len(kept.missed) > 1:
            await work.run(kept.fold, name="add up what the code missed")
        further = await work.run(lambda: feedback.go_on(kept.vector), name="make room for what the code misses")
        return _Sum(kept.vector, (*kept.missed, further), kept.own)

    def _with_residual(self, vector: Vector) -> _Sum:
        """Our gradient plus the residual of earlier rounds. A copy if there is a residual to add."""
        feedback = self._feedback
        if feedback is None:
            return _Sum(vector, own=True)
        ours = vector.copy() if feedback.residual is not None else vector
        return _Sum(ours, (feedback.begin(ours),), own=True)

    async def _of_factors(self, plan: AveragingPlan, vector: Vector, code: PowerSgd) -> Total:
        """The sum by PowerSGD's factors in two rounds; the second sums the projections on the first."""
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
        """Discard all sums, because they are of another position."""
        self._kept.clear()

    async def digest(self, total: Total) -> bytes:
        """The digest of `total`, computed on the worker; see `Total.digest`."""
        return await self._worker.run(total.digest, name="digest the sum")

    def forget(self) -> None:
        """Drop the residual, because the parameters are no longer those it was computed for."""
        if self._feedback is not None:
            self._feedback.forget()

    def told(self) -> dict[str, object]:
        """Numbers of rounds by outcome, for status."""
        return self._averaging.outcomes.told()
