"""Role `aux`: sums gradients for the peers of one stage, without a model or data of its own.

A machine with a good line and no accelerator: it takes part in averaging rounds as an owner of parts that sends none,
with a share as large as its line. The conductor learns of it by its reports and names it in the orders to average; a
round can do without it, so nothing is lost when it goes. Obeys only the conductor that it follows.
"""

from __future__ import annotations

from typing import ClassVar

import trio

from peerd.compute.codec.error_feedback import feedback_of
from peerd.core.errors import ProtocolViolation, Refused
from peerd.core.messages.swarm import Mbs, MemberAnswer, MemberSync, Position, Prepare, Prepared
from peerd.core.runfile import RunFile
from peerd.machine.averaging.allreduce import AveragingPlan, RoundFailed
from peerd.machine.averaging.stats import explained
from peerd.machine.conductor.member_list import KnownMembers
from peerd.role import RoleContext
from peerd.service.rpc.rpc import Answer, Incoming, MethodLimits
from peerd.service.run_services import Training
from peerd.training.stage.line_info import own_line

_SYNC_WAIT_S = 2.0
_START = Position(0, b"")


class AuxRole:
    """See the module's header."""

    name: ClassVar[str] = "aux"
    needs_run: ClassVar[bool] = True

    def __init__(self, ctx: RoleContext) -> None:
        assert ctx.run is not None
        self._ctx = ctx
        self._run: RunFile = ctx.run
        self._training = Training(ctx.run, ctx.host, ctx.rpc, ctx.dht, ctx.clock)
        self._following = self._training.following
        self._averaging = self._training.averaging()
        self._worker = ctx.worker("coding")
        self._coder = feedback_of(ctx.run.averaging)
        self._stage = ctx.run.limits.stage or 0
        self._session = int.from_bytes(ctx.clock.secure_bytes(6), "big")
        self._since = ctx.clock.wall()
        self._term = self._seen = 0
        self._changes = -1
        self._busy_s = 0.0
        self._aggregated = 0
        self._tally = self._training.tally("aux", ctx.data_dir / "contributed.json", ctx.worker("files"))
        self._listed = KnownMembers()
        self._waits_for: str | None = "the conductor"

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        orders = MethodLimits(body_bytes=1 << 20, calls_per_peer=4)
        try:
            await self._training.compare_settings()
            self._ctx.rpc.serve("stage/2/prepare", Prepare, self._prepare, limits=orders)
            task_status.started()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._training.assembling().run, self._stage)
                nursery.start_soon(self._tally.run)
                await self._follow()
        finally:
            for service in ("stage/2", "average/1"):
                self._ctx.rpc.unserve(service)

    async def leave(self) -> None:
        """Say goodbye: the next round is made without us."""
        await self._following.say_goodbye(self._training.fingerprint)

    def status(self) -> dict[str, object]:
        conductor = self._following.conductor
        return {
            "stage": self._stage,
            "next_step_in_s": self._following.step_in_s,
            "averaging": self._averaging.outcomes.told(),
            "busy_s": self._busy_s,
            "aggregated_bytes": self._aggregated,
            "conductor": conductor.text if conductor else None,
            "waits_for": self._following.waits_for or self._waits_for or self._why_left_out(),
        }

    def _why_left_out(self) -> str | None:
        return None if self._ctx.host.takes_inbound else "this peer cannot be dialed: it is left out of rounds"

    async def _follow(self) -> None:
        """Report to the conductor, so that it counts on us and we know whom to obey."""
        while True:
            answer = await self._following.ask("swarm/2/member", self._report, MemberAnswer, _SYNC_WAIT_S + 8.0)
            self._term, self._seen = max(self._term, answer.term), answer.version
            self._following.note_forecast(answer.forecast)
            if (members := self._listed.take(answer.members)) is not None:
                self._following.note_members(members)
            self._waits_for = answer.waits_for or (None if self._averaging.outcomes.rounds else "the first round")

    def _report(self) -> MemberSync:
        new = self._following.changes != self._changes
        if new:
            self._changes, self._seen = self._following.changes, 0
            self._listed.forget()
        return MemberSync(
            run=self._training.fingerprint,
            session=self._session,
            stage=self._stage,
            position=_START,
            prepared=None,
            saved=[],
            held=None,
            counted=Mbs(),
            addrs=self._training.directory.own_addrs(),
            since=self._since,
            term=self._term,
            seen=self._seen,
            wait_s=0.0 if new or self._listed.more else _SYNC_WAIT_S,
            line=own_line(self._training.carries(), "aux"),
            listed=self._listed.version,
        )

    async def _prepare(self, call: Incoming[Prepare]) -> Answer[Prepared]:
        """Sum our share of one round, of both sums if it has two; we hold no gradient and keep no mean."""
        body = call.body
        if body.run != self._training.fingerprint:
            raise Refused("your run file differs from this run's")
        if call.peer != self._following.conductor:
            raise Refused("this peer does not follow you")
        averaging, began = self._run.averaging, self._ctx.clock.now()
        try:
            plan = AveragingPlan.of(body, averaging.part_bytes, averaging.sender_timeout_s)
        except ValueError as error:
            raise ProtocolViolation(str(error), call.peer) from None
        if self._ctx.host.id.text in plan.senders:
            raise Refused("this peer has no gradient to send")
        if self._ctx.host.id.text not in plan.group:
            return Answer(Prepared(True, Mbs(), []))  # this round is made without us
        try:
            plans = (plan, plan.second()) if plan.further else (plan,)
            with self._averaging.expecting([one.attempt for one in plans]):
                for one in plans:
                    await self._averaging.sum(one, None, self._worker, self._coder)
        except RoundFailed as error:
            self._ctx.log.event("averaging failed", level="warning", step=body.step, reason=explained(error))
            return Answer(Prepared(False, Mbs(), list(error.lost)))
        self._busy_s += self._ctx.clock.now() - began
        self._tally.add(bytes_aggregated=self._averaging.aggregated_bytes - self._aggregated)
        self._aggregated = self._averaging.aggregated_bytes
        return Answer(Prepared(True, Mbs(), []))
