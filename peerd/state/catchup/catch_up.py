"""Catch-up of a member that is behind: downloads a state from its stage-mates, then replays the steps made since.

The swarm makes further steps during a download. From the moment a state is chosen, the totals (summed gradients) of
these steps are therefore fetched as well and applied with the optimizer, which gives the same bits as at all other
members. Only if no peer keeps a total any longer is another state fetched. A member that is a few steps late needs only
totals. A member whose internet connection is too slow to keep up reports this and pauses instead of fetching state
after state (`state/catch_up_pace`). This module also implements the donor's side: it serves this peer's state
and totals to peers that are behind.

Invariants: the member's parameters change only through its own methods (`CatchingMember`), as a whole, from the
expected position, and to a state whose root digest most donors confirm. For hostile donors see
`state.snapshot`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

import trio
from torch import Tensor

from peerd.core.errors import NoMemory, PeerdError, RemoteError
from peerd.core.ids import PeerId
from peerd.core.signals import Signal
from peerd.core.work import Worker
from peerd.messages.state import StateRequest, TensorSpec
from peerd.messages.swarm import MemberInfo, Position
from peerd.model.frozen_state import FrozenState
from peerd.model.stage.footprint import spare_bytes
from peerd.model.stage.microbatch_books import Stale
from peerd.model.stage.served_stage import Model
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.state.catch_up_pace import CatchUpPace, Sizes
from peerd.state.catchup.copy_room import room_for_copy
from peerd.state.catchup.step_totals import StepTotal, StepTotals
from peerd.state.catchup.totals_trail import TotalsTrail
from peerd.state.catchup.validate import state_at
from peerd.state.failure_streak import FailureStreak
from peerd.state.snapshot import StateItem

T = TypeVar("T")

_PAUSE_S = 0.5  # while there is no donor, and after the first of the downloads that fail
_LONGEST_PAUSE_S = 20.0  # after many that failed
_TIDY_S = 3.0  # between two checks for copies and totals that no peer fetches any longer
_LATE_S = 5.0  # time after a step by which a member that missed it is known or asks for the total


class CatchingMember(Protocol):
    """What `CatchUp` needs from the member that catches up."""

    @property
    def position(self) -> Position:
        """The position of its parameters."""
        ...

    @property
    def model(self) -> Model:
        """The model of its stage."""
        ...

    @property
    def moving(self) -> trio.Lock:
        """The lock that is held during each change or copy of the parameters."""
        ...

    async def work(self, job: Callable[[], T], name: str) -> T:
        """Run a job on the model's device."""
        ...

    async def take_over(self, before: Position, position: Position, state: dict[str, Tensor]) -> None:
        """Replace the parameters, which are at position `before`, by a complete state at `position`.

        Raises ValueError if the state does not fit, and PositionChanged if the member is not at `before`.
        """
        ...

    async def step_on(self, before: Position, leap: StepTotal) -> None:
        """Make the optimizer step that follows `before`. Raises the same errors as `take_over`."""
        ...

    async def reached(self, step: int) -> None:
        """Wait until the parameters are at that step or a later one."""
        ...


class ConductorReports(Protocol):
    """What `CatchUp` needs from the member's session with the conductor."""

    @property
    def members(self) -> list[MemberInfo]:
        """All members and helpers of the swarm, as last listed by the conductor."""
        ...

    def tell(self) -> None:
        """Report the current position to the conductor at once."""
        ...


async def _keep_nothing(position: Position) -> None:
    pass


class PositionChanged(PeerdError):
    """The member is not at the expected position, because another task moved it meanwhile."""


# Errors that end one attempt, not the role. After NoMemory in the middle of a change, `PostState.run` raises.
_FAILED = (RemoteError, ValueError, PositionChanged, Stale, NoMemory)


class CatchUp:
    """One member's downloads, and the state and totals that it serves to others. Serves nothing before `offer`."""

    def __init__(
        self, ctx: RoleContext, services: RunServices, coding: Worker, joiner: CatchingMember, reports: ConductorReports
    ) -> None:
        self._awaited: str | None = None  # what the member waits for, as text
        self._failures = FailureStreak(_PAUSE_S, _LONGEST_PAUSE_S)
        self._failed_donors: set[PeerId] = set()  # donors at the last failure
        self._ctx, self._services, self._coding, self._joiner, self._reports = ctx, services, coding, joiner, reports
        self._snapshots = services.snapshots()
        self._snapshots.notes = lambda text: ctx.log.event("stage.download_noted", note=text)
        self._snapshots.totals.notes = lambda text: ctx.log.event("stage.download_noted", level="debug", note=text)
        self._snapshots.folder = self._snapshots.totals.folder = ctx.data_dir
        self._turn = int.from_bytes(ctx.clock.secure_bytes(6), "big")
        self._stage = -1
        self._totals: StepTotals | None = None
        self._state_bytes = 0
        self._kept_at = 0.0  # when the newest total was kept
        self._goal: Position | None = None  # the swarm's position while ours differs
        self.keep_branch: Callable[[Position], Awaitable[None]] = _keep_nothing  # before a branch is dropped
        self._apart: Position | None = None  # our position, if the swarm's conductor never saw it
        self._kept_apart: Position | None = None  # the last such position whose state was kept
        self._seen = Signal()
        self._trail: TotalsTrail | None = None
        self._pace = CatchUpPace(services.run.limits.keep_totals)
        self._too_slow: str | None = None  # the logged reason, while the line is too slow
        self._total_bytes = 0  # bytes of totals received so far

    @property
    def waits_for(self) -> str | None:
        """What the member waits for, with the reason of the last failure, as text. None if it needs nothing."""
        count, reason = self._failures.count, self._failures.reason
        if self._awaited is None or reason is None:
            return self._awaited
        return f"{self._awaited}; {count} {'attempt' if count == 1 else 'attempts'} failed, the last one: {reason}"

    @property
    def received_bytes(self) -> int:
        """Bytes received so far: of all totals, and of the newest state download."""
        report = self._snapshots.report
        return self._total_bytes + (report.received if report is not None else 0)

    @property
    def given_bytes(self) -> int:
        """Bytes of states and totals that others have fetched from this peer."""
        return self._snapshots.giving.given_bytes

    # --- serving ------------------------------------------------------------------------------------------------

    def offer(self, stage: int) -> None:
        """Start to serve our state, and the totals of our last steps, to stage-mates."""
        self._stage = stage
        joiner, run, giving = self._joiner, self._services.fingerprint, self._snapshots.giving
        writer, folder = self._ctx.worker("files"), self._ctx.data_dir
        standing, reached = (lambda: joiner.position), joiner.reached
        giving.offer(run, stage, self.freeze, writer, standing, reached, self._outline, folder)
        giving.offer_named(run, stage, self._total_after, self._coding)

    def withdraw(self) -> None:
        """Stop serving this stage's state and totals."""
        self._snapshots.giving.withdraw(self._stage)

    def keep(self, before: Position, leap: StepTotal) -> None:
        """Keep the total of the step that followed `before`. Earlier totals are dropped unless a stage-mate may need
        them.
        """
        run = self._services.run
        if self._totals is None:
            self._state_bytes = sum(spec.nbytes for spec in self._joiner.model.outline())
            self._totals = StepTotals(0, run.limits.keep_totals)
        if not self._totals_are_wanted:
            self._totals.forget()
        self._totals.most_bytes = spare_bytes(run, self._state_bytes, self._totals.memory_bytes)
        self._totals.keep(before, leap)
        self._kept_at = self._ctx.clock.now()

    @property
    def _totals_are_wanted(self) -> bool:
        """True while a stage-mate is behind or a peer fetches our state; these peers need the totals of our steps.

        Helpers and resting members are not counted: they are never ready and make no steps.
        """
        makes_steps = [m for m in self._reports.members if m.stage == self._stage and m.since and not m.rests]
        return self._snapshots.giving.in_use or not all(mate.ready for mate in makes_steps)

    async def _outline(self) -> list[TensorSpec]:
        return await self._joiner.work(self._joiner.model.outline, "outline the state")

    async def freeze(self) -> tuple[Position, FrozenState]:
        """A frozen copy of this peer's current state, with its position."""
        async with self._joiner.moving:
            room = partial(room_for_copy, self._services.run, self._ctx.data_dir)
            state = await self._joiner.work(lambda: self._joiner.model.freeze(room), "freeze the state")
            return self._joiner.position, state

    async def _total_after(self, before: Position) -> tuple[Position, list[StateItem]] | None:
        leap = self._totals.after(before) if self._totals is not None else None
        return (leap.target, leap.items()) if leap is not None else None

    # --- catching up --------------------------------------------------------------------------------------------

    @property
    def is_apart(self) -> bool:
        """True while this peer is at a position that the swarm's conductor never saw."""
        return self._apart is not None

    def swarm_at(self, current: Position, stated: Position, apart: bool = False) -> None:
        """Process the swarm's position, which the conductor sent when we reported to be at position `stated`.

        `apart` is True if the conductor never saw position `stated`.
        """
        position = self._joiner.position
        self._apart = stated if apart else None
        self._pace.swarm_at(self._ctx.clock.now(), current.step)
        if position == current:
            self._pace.arrived()
            self._arrived()  # also if the swarm moved to our position
        if self._goal is None and (stated != position or position == current):
            return  # a commit came in between, or the positions agree
        self._goal = None if position == current else current
        self._seen.notify()
        if self._trail is not None:
            self._trail.look()

    async def run(self) -> None:
        """Catch up whenever the swarm's position differs from ours."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tidy)
            while True:
                if self._goal is None:
                    await self._seen.wait()
                    continue
                moved = await self._attempt()
                self._goal = None  # until the conductor's next answer
                if moved:
                    self._arrived()
                    self._reports.tell()
                else:
                    await self._pause()

    def _arrived(self) -> None:
        self._awaited = None
        if count := self._failures.succeeded():
            self._ctx.log.event("stage.download_recovered", stage=self._stage, failures=count)

    async def _pause(self) -> None:
        """Wait before the next attempt. Return early if a donor appears that the last attempt did not have."""
        until = trio.current_time() + max(_PAUSE_S, self._failures.pause_s)
        while trio.current_time() < until:
            await trio.sleep(min(_PAUSE_S, until - trio.current_time()))
            donors = set(self._donors())
            if donors - self._failed_donors:
                return
            self._failed_donors &= donors

    async def _tidy(self) -> None:
        while True:
            await trio.sleep(_TIDY_S)
            self._snapshots.giving.let_go()
            if self._totals is None:
                continue
            if self._totals_are_wanted:
                await self._totals.put_out(self._ctx.data_dir, self._ctx.worker("files"))
            elif self._ctx.clock.now() - self._kept_at > _LATE_S:
                self._totals.forget()

    async def _attempt(self) -> bool:
        """Catch up by totals alone if these are fewer bytes than a state, else by a state and totals.

        Returns False if the position did not change.
        """
        goal, begun = self._goal, self._joiner.position
        assert goal is not None
        if not self._donors():
            self._awaited = f"a peer of stage {self._stage} with the state of step {goal.step}"
            self._failed_donors = set()
            return False
        if self._is_too_slow():
            return False
        try:
            expected = await self._joiner.work(lambda: self._joiner.model.outline(), "outline the state")
            late_bytes = (goal.step - begun.step) * self._joiner.model.vector_outline().nbytes
            if 0 < late_bytes <= sum(spec.nbytes for spec in expected):
                self._awaited = f"the steps up to {goal.step} from a stage-mate"
                with suppress(Stale):  # the parameters are of an unexpected step: fetch a complete state instead
                    await self._along_a_trail(self._from_here)
            if self._joiner.position not in (goal, self._goal):
                self._awaited = f"the state of step {goal.step} from a stage-mate"
                await self._along_a_trail(partial(self._from_a_state, expected))
        except _FAILED as error:
            self._note_failure(error)
        return self._joiner.position != begun

    def _note_failure(self, error: Exception) -> None:
        """Count a failed attempt. The log gets one line for each kind of error, and a reminder now and then."""
        reason, failures = str(error), self._failures
        self._failed_donors = set(self._donors())
        if (count := failures.failed(trio.current_time(), type(error).__name__, reason)) is not None:
            facts = {"stage": self._stage, "reason": reason, "count": count, "retry_s": failures.pause_s}
            self._ctx.log.event("stage.download_failed", level="warning", **facts)

    def _is_too_slow(self) -> bool:
        """True if a state fetched now would be outdated before it has arrived, as the last ones were. Logs the reason,
        with the measured rates, once.
        """
        why = self._pace.too_slow(self._ctx.clock.now(), [donor.text for donor in self._donors()])
        if why is None:
            self._too_slow = None
            return False
        if self._too_slow is None:  # the figures change all the time; log them once
            self._too_slow = why
            self._ctx.log.event("stage.too_slow", level="warning", stage=self._stage, reason=why)
        self._awaited = self._too_slow
        return True

    async def _along_a_trail(self, start: Callable[[TotalsTrail], Awaitable[Position]]) -> None:
        """Fetch the totals of a trail and apply its steps meanwhile, from the position that `start` reaches."""
        trail = self._trail = TotalsTrail(self._fetch_total, lambda: self._goal)
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trail.lay)
                try:
                    await self._walk(await start(trail), trail)
                except _FAILED as error:
                    failure = error  # so that it is not raised in an exception group
                nursery.cancel_scope.cancel()
        finally:
            self._trail = None
        if failure is not None:
            raise failure

    async def _from_here(self, trail: TotalsTrail) -> Position:
        trail.begin(self._joiner.position)
        return self._joiner.position

    async def _from_a_state(self, expected: Sequence[TensorSpec], trail: TotalsTrail) -> Position:
        """Download and apply a stage-mate's state.

        Meanwhile `trail` starts to fetch the totals of the steps that follow that state.
        """
        before = self._joiner.position
        if before == self._apart != self._kept_apart and before.step:
            goal = self._goal.step if self._goal is not None else 0
            self._ctx.log.event("stage.branch_left", level="warning", stage=self._stage, before=before.step, step=goal)
            await self.keep_branch(before)
            self._kept_apart = before
        request = StateRequest(self._services.fingerprint, self._stage)
        donors, had, began = [donor.text for donor in self._donors()], self._total_bytes, self._ctx.clock.now()

        def choose(position: Position) -> None:
            nonlocal had, began
            had, began = self._total_bytes, self._ctx.clock.now()
            trail.begin(position)

        self._snapshots.chosen = choose
        try:
            position, items, _ = await self._snapshots.fetch(self._donors, request, expected, self._coding)
        finally:
            now, brought = self._ctx.clock.now(), self._total_bytes - had
            if (report := self._snapshots.report) is not None:
                self._pace.fetched(now, self._sizes(expected), report.received + brought, now - began, donors)
        state = await self._joiner.work(partial(state_at, position, items), "check the downloaded state")
        await self._joiner.take_over(before, position, state)
        self._ctx.log.event("stage.downloaded", stage=self._stage, step=position.step)
        return position

    def _sizes(self, expected: Sequence[TensorSpec]) -> Sizes:
        total = sum(spec.nbytes for spec in StepTotal.outline(self._joiner.model))
        return Sizes(sum(spec.nbytes for spec in expected), total)

    async def _walk(self, position: Position, trail: TotalsTrail) -> None:
        """Apply the trail's steps until it ends."""
        first = position.step
        while (leap := await trail.next()) is not None:
            await self._joiner.step_on(position, leap)
            self.keep(position, leap)
            position = leap.target
        if position.step > first:
            self._ctx.log.event("stage.caught_up", stage=self._stage, step=position.step, steps=position.step - first)
        if trail.broken is not None:
            self._ctx.log.event("stage.trail_broken", stage=self._stage, step=position.step, reason=trail.broken)

    async def _fetch_total(self, before: Position) -> StepTotal:
        request = StateRequest(self._services.fingerprint, self._stage, of=before)
        expected = StepTotal.outline(self._joiner.model)
        position, items, _ = await self._snapshots.totals.fetch(self._donors, request, expected, self._coding)
        self._total_bytes += sum(spec.nbytes for spec in expected)
        return StepTotal.of(position, items)

    def _donors(self) -> list[PeerId]:
        """Stage-mates that have the state. Each newcomer begins with a random one, so that no single donor serves them
        all.
        """
        own = self._ctx.host.id.text
        names = [m.peer for m in self._reports.members if m.ready and m.stage == self._stage and m.peer != own]
        turn = self._turn % max(1, len(names))
        return [PeerId.parse(name) for name in names[turn:] + names[:turn]]
