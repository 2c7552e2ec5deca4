"""Role `aux`: sums gradients for the peers of one stage, without a model or data of its own.

For a machine with a fast link and no accelerator. In averaging rounds it owns parts of the vector without contributing
gradients, with a share in proportion to its link. The conductor learns of it from its reports and names it in the
orders to average. A round can do without it, so nothing is lost when it leaves. It obeys only the conductor that it
follows. It does not help a stage served by the same process, whose members already use their whole link for sums.
"""

from __future__ import annotations

from typing import ClassVar

import trio

from peerd.averaging.rounds.helper_rounds import HelperRounds
from peerd.averaging.rounds.line_info import own_line
from peerd.messages.swarm import MemberAnswer, Position, Prepare, Prepared
from peerd.pipeline.stage.session import ConductorSession, PostReport
from peerd.pipeline.stage_calls import StageHandlers
from peerd.role.role import RoleContext
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.runfile import RunFile


class AuxAggregatorRole:
    """Role of a helper that sums gradients for one stage at a time."""

    name: ClassVar[str] = "aux"
    needs_run: ClassVar[bool] = True

    def __init__(self, ctx: RoleContext) -> None:
        assert ctx.run is not None
        assert ctx.services is not None
        self._ctx, self._services = ctx, ctx.services
        self._run: RunFile = ctx.run
        self._following = self._services.following
        self._averaging = self._services.averaging
        self._rounds = HelperRounds(ctx, ctx.worker("coding"))
        self._busy_s = 0.0
        self._tally = self._services.tally("aux", ctx.data_dir / "contributed.json", ctx.worker("files"))
        self._session: ConductorSession | None = None  # of the stage that it helps
        self._waits_for: str | None = "the conductor"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Help one stage; switch to another one if this process starts to serve it."""
        await self._services.settings.compare()
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tally.run)
            while True:
                stage = self._stage_to_help()
                if stage is not None:
                    await self._help(stage)
                else:
                    self._waits_for = "a stage to help: this process already serves and sums for all stages"
                    await self._services.calls.changed()

    def _stage_to_help(self) -> int | None:
        """The first stage of limits.stage, else of all stages, that this process does not serve itself, or None."""
        served, stages = self._services.calls.stages, range(self._run.pipeline.stages)
        return next((stage for stage in (*self._run.limits.stages, *stages) if stage not in served), None)

    async def _help(self, stage: int) -> None:
        """Help `stage`; returns when this process serves it itself."""
        self._session = session = ConductorSession(self._services, stage, self)
        self._waits_for = "the conductor"
        try:
            with self._services.calls.helping(stage, StageHandlers(prepare=self._prepare)):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._services.assembling().run, stage)
                    await session.run()
        finally:
            self._session = None  # no goodbye: the stage's own session has taken over the post

    async def leave(self) -> None:
        """Say goodbye to the conductor, so that the next round is made without this peer."""
        if self._session is not None:
            await self._session.say_goodbye()

    def status(self) -> dict[str, object]:
        """Plain data, see `peerd.role.role.Role.status`."""
        conductor = self._following.conductor
        return {
            "stage": self._session.stage if self._session is not None else -1,
            "next_step_in_s": self._following.step_in_s,
            "averaging": self._averaging.outcomes.told(),
            "busy_s": self._busy_s,
            "aggregated_bytes": self._averaging.aggregated_bytes,
            "conductor": conductor.text if conductor else None,
            "waits_for": self._why_waiting(),
        }

    def _why_waiting(self) -> str | None:
        waits = self._services.view.waits_for() or self._following.waits_for
        return waits or self._waits_for or self._why_left_out()

    def _why_left_out(self) -> str | None:
        return None if self._ctx.host.takes_inbound else "this peer cannot be dialed, so it is left out of rounds"

    # --- the conductor's side ---------------------------------------------------------------------------------

    def report(self, whole: bool) -> PostReport:
        """The current report to the conductor: this helper's link rates."""
        return PostReport(line=own_line(self._services.line_speeds(), "aux"), helps=True)

    def heard(self, answer: MemberAnswer, stated: Position) -> None:
        """Process the conductor's answer to a report."""
        self._waits_for = answer.waits_for or (None if self._averaging.outcomes.rounds else "the first round")

    async def _prepare(self, call: Incoming[Prepare]) -> Answer[Prepared]:
        """Sum this peer's share of one round (of both sums, if the round has two). An aux peer keeps no mean."""
        began = self._ctx.clock.now()
        prepared = await self._rounds.sum(call)
        if prepared.ok:
            self._busy_s += self._ctx.clock.now() - began
            self._tally.add(bytes_aggregated=self._averaging.newly_aggregated_bytes())
        return Answer(prepared)
