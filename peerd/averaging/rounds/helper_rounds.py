"""HelperRounds: averaging rounds in which this peer sums parts for others and contributes no gradient of its own.

Used by aux peers and by resting members. The conductor's order names the senders. A helper refuses an order that lists
it as a sender, and does nothing in a round in which it has no share.
"""

from __future__ import annotations

from peerd.averaging.allreduce_round import AveragingPlan, RoundFailed
from peerd.averaging.stats import explained
from peerd.codec.error_feedback import feedback_of
from peerd.core.errors import ProtocolViolation, Refused
from peerd.core.work import Worker
from peerd.messages.swarm import Mbs, Prepare, Prepared
from peerd.role.role import RoleContext
from peerd.rpc.rpc import Incoming


class HelperRounds:
    """Executes the conductor's orders to sum for others. Sums and codes on `worker`."""

    def __init__(self, ctx: RoleContext, worker: Worker) -> None:
        assert ctx.run is not None
        assert ctx.services is not None
        self._ctx, self._worker = ctx, worker
        self._settings, self._averaging = ctx.run.averaging, ctx.services.averaging
        self._coder = feedback_of(ctx.run.averaging)

    async def sum(self, call: Incoming[Prepare]) -> Prepared:
        """Sum this peer's share of the ordered round; both sums, if the order has two.

        Raises Refused if the order lists this peer as a sender, and ProtocolViolation if the order is inconsistent.
        """
        body, own = call.body, self._ctx.host.id.text
        try:
            plan = AveragingPlan.of(body, self._settings.part_bytes, self._settings.sender_timeout_s)
        except ValueError as error:
            raise ProtocolViolation(str(error), call.peer) from None
        if own in plan.senders:
            raise Refused("this peer has no gradient to send")
        if own not in plan.group:
            return Prepared(True, Mbs(), [])  # not part of this round
        plans = (plan, plan.second()) if plan.further else (plan,)
        try:
            with self._averaging.expecting([one.attempt for one in plans]):
                for one in plans:
                    await self._averaging.sum(one, None, self._worker, self._coder)
        except RoundFailed as error:
            self._ctx.log.event("averaging.failed", level="warning", step=body.step, reason=explained(error))
            return Prepared(False, Mbs(), list(error.lost))
        return Prepared(True, Mbs(), [])
