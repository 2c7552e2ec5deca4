"""The conductor's orders to a post: average its part (prepare), step (commit), return to a checkpoint (restore).

`StageCalls` has checked that the orders are of this run, for this stage, and from the conductor that this peer follows.
Invariant: a post steps only with the sum whose digest it reported. A hostile conductor may order rounds with members
that do not exist or fail (the round fails and names them), positions that no peer has (refused), and the same order
repeatedly (no effect: the post is already there).
"""

from __future__ import annotations

from collections.abc import Callable

from peerd.averaging.allreduce_round import AveragingPlan, RoundFailed
from peerd.averaging.rounds.averaging_rounds import AveragingRounds, SumAbsent, Total
from peerd.averaging.rounds.helper_rounds import HelperRounds
from peerd.averaging.stats import explained
from peerd.core.errors import ProtocolViolation, Refused
from peerd.core.ids import is_peer_text
from peerd.core.work import Worker
from peerd.messages.proof import commit_signature
from peerd.messages.swarm import Commit, Mb, Mbs, Moved, Position, Prepare, Prepared, Restore
from peerd.model.stage.microbatch_books import Stale
from peerd.model.stage.served_stage import Unusable, Vector
from peerd.pipeline.stage.post_state import PostState
from peerd.pipeline.stage.serving import ServingCalls
from peerd.role.role import RoleContext
from peerd.rpc.rpc import Answer, Incoming
from peerd.state.catchup.step_totals import StepTotal

Stepped = Callable[[Position, StepTotal, int], None]  # position before, leap for others, number of our microbatches


class PostOrders:
    """The orders to one post. `counted` and `digest` are of the last sum that was prepared or stepped with."""

    def __init__(
        self, ctx: RoleContext, state: PostState, rounds: AveragingRounds, serving: ServingCalls, coding: Worker
    ) -> None:
        self._ctx = ctx
        self._helper = HelperRounds(ctx, coding)  # while this peer rests
        self._state, self._rounds, self._serving = state, rounds, serving
        self.stepped: Stepped = lambda before, leap, counted: None
        self.prepared: Position | None = None  # the position after a commit
        self._total: Total | None = None  # the sum for the commit
        self._total_of = b""  # the attempt that made it
        self.counted: list[Mb] = []
        self.digest = b""
        self._closed = False

    def close(self) -> None:
        """Refuse all orders from now on, because the peer leaves the post."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise Refused("this peer is leaving its stage")

    def arrived(self, anew: bool) -> None:
        """Discard the prepared sum at a new position. `anew` is True if it was not reached by a step of this post."""
        self.prepared, self._total = None, None
        self._rounds.drop_sums()
        if anew:
            self.counted, self.digest = [], b""
            self._rounds.forget()

    # --- averaging --------------------------------------------------------------------------------------------

    async def prepare(self, call: Incoming[Prepare]) -> Answer[Prepared]:
        """Sum gradients of a step, or partial sums, with stage-mates. Answers when the sum is ready."""
        self._check_open()
        body = call.body
        if not all(map(is_peer_text, body.group)):
            raise ProtocolViolation("the group contains an invalid peer id", call.peer)
        if self._ctx.host.id.text not in body.group:
            with self._rounds.under_way(body.attempt, call.peer, helps=True):
                return Answer(await self._helper.sum(call))
        if body.step != self._state.position.step:
            return Answer(Prepared(False, body.assigned, []))
        plan = self._rounds.plan(body, call.peer)
        self._rounds.call_off_for(body.attempt)
        async with self._state.moving:
            if body.step != self._state.position.step:  # it moved while this call waited
                return Answer(Prepared(False, body.assigned, []))
            with self._rounds.under_way(body.attempt, call.peer):
                return Answer(await self._average(body, plan))

    async def _average(self, order: Prepare, plan: AveragingPlan) -> Prepared:
        """Sum this post's part with its stage-mates; keep the result for a later order or, if it is the last, for the
        commit.
        """
        self._serving.closing = True
        model = self._state.model
        try:
            vector: Vector | None = None
            if self._rounds.brings_gradient(order):
                part = await self._state.work(lambda: self._part_of(order), "copy the gradient", urgent=True)
                if isinstance(part, list):
                    return Prepared(False, Mbs.of(part), [])
                vector = part
            total = await self._rounds.total(order, plan, vector, model.low_rank)
            digest = await self._rounds.digest(total)
        except Unusable as error:
            self._ctx.log.event("averaging.not_summed", level="warning", step=order.step, reason=str(error))
            return Prepared(False, Mbs(), [], refused=Mbs.of(error.mbs))
        except SumAbsent as error:
            self._ctx.log.event("averaging.failed", level="warning", step=order.step, reason=str(error))
            return Prepared(False, Mbs(), [], absent=True)
        except RoundFailed as error:
            self._ctx.log.event("averaging.failed", level="warning", step=order.step, reason=explained(error))
            return Prepared(False, Mbs(), list(error.lost))
        except Stale as error:
            raise Refused(str(error)) from None
        finally:
            self._serving.closing = False
            if not self._rounds.keeps(self._total_of):  # the sum was of a cancelled attempt
                self.prepared, self._total = None, None
        if order.last:
            copied = plan.senders == (self._ctx.host.id.text,) and self._rounds.keeps(order.brings or b"")
            self._total, self._total_of = total, (order.brings or b"") if copied else order.attempt
            self.prepared = Position(order.step + 1, order.lineage)
            self.counted, self.digest = list(order.assigned), digest
        return Prepared(True, Mbs(), [], digest)

    def _part_of(self, order: Prepare) -> Vector | list[Mb]:
        """The post's part of the sum, or the list of assigned microbatches that it lacks. Runs as one job on the
        device.
        """
        model = self._state.model
        if missing := model.keep_only(order.step, order.assigned):
            return missing
        if refused := model.unusable(order.step):
            raise Unusable(refused)
        return model.vector(order.leads)

    # --- moving -----------------------------------------------------------------------------------------------

    async def commit(self, call: Incoming[Commit]) -> Answer[Moved]:
        """Step with the prepared sum. The answer has this member's signature of the step."""
        self._check_open()
        position = await self._state.move(call.body.target, self._step_to)
        if position != call.body.target or not self.digest:
            return Answer(Moved(position))
        signature = commit_signature(self._ctx.host.sign, call.body.run, self._state.stage, position, self.digest)
        return Answer(Moved(position, self.digest, signature))

    async def restore(self, call: Incoming[Restore]) -> Answer[Moved]:
        """Return to a checkpoint of this post."""
        self._check_open()
        return Answer(Moved(await self._state.move(call.body.target, self._state.load_saved)))

    async def _step_to(self, target: Position) -> None:
        total, before = self._total, self._state.position
        if target != self.prepared or total is None:
            raise Refused(f"no prepared average for step {target.step} here")
        leap = await self._state.step(target, total)
        if await self._state.has_diverged(target):
            return
        self.stepped(before, leap, len(self.counted))
        self._state.arrive(target)
        await self._state.save_if_due()
