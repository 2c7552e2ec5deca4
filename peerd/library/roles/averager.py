"""Role `library`: a user's own training loop as one peer of a data-parallel run. Created by `peerd.library`, not by
name.

Runs a stage member whose model is the user's, and contributes the gradients that the user's thread hands in
(`handoff`). It requests a place in the batch only when a gradient may come soon: the user's thread waits or computes,
and its parameters are the swarm's. So each computing user has a place, and a step ends when all have handed in. Runs
until it is stopped.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

import trio

from peerd.core.errors import ConfigError
from peerd.library.roles.handoff import GradientHandoff, HandedGradient
from peerd.messages.progress import TrainerProgress
from peerd.messages.run_link import RunFileAnswer, shared_file
from peerd.messages.swarm import Mb, MemberInfo, TrainerAnswer
from peerd.model.stage.microbatch_books import Stale
from peerd.model.stage.user_model import UserModel
from peerd.pipeline.routes.second_opinion import MicrobatchNotFinite
from peerd.pipeline.stage.external_model import ExternalModel
from peerd.pipeline.stage.final_state import FinalState
from peerd.pipeline.stage.member import StageMember
from peerd.pipeline.stage.post import Post
from peerd.pipeline.trainer.contributor import Contributor
from peerd.role.role import RoleContext
from peerd.role.run_offer import SIGNATURE_FILE, RunOffer, own_signature
from peerd.swarm.batch.trainer_ledger import Holding
from peerd.wire.rate.work_rate import WorkRate

_SETTINGS_S: Final = 3.0  # between two comparisons of settings before the first step


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A microbatch that the user has yet to compute. It has no content: the user's loop supplies the samples."""


@dataclass(slots=True)
class UserPart:
    """The user's side of the role: model, gradient hand-off, settings, and the running role."""

    model: UserModel
    desk: GradientHandoff
    min_peers: int  # needed before the first step
    saves: bool
    role: AveragerRole | None = None  # the running one


class AveragerRole:
    """Role that contributes the gradients of a user's own loop; `role_for` makes a subclass for each user."""

    name: ClassVar[str] = "library"
    acts_as: ClassVar[str] = "trainer"  # in a run with tokens
    needs_run: ClassVar[bool] = True
    part: ClassVar[UserPart]

    def __init__(self, ctx: RoleContext) -> None:
        assert ctx.run is not None
        part = self.part
        self._ctx, self._run = ctx, ctx.run
        self._model, self._desk = part.model, part.desk
        self._samples, self._min_peers = ctx.run.pipeline.microbatch, part.min_peers
        assert ctx.services is not None
        self._services = ctx.services
        self._member = StageMember(ctx, ExternalModel(part.model, self._changing, part.saves))
        self._final = FinalState(ctx, self._services, self._member)
        self._contributor: Contributor[UserTurn] = Contributor(ctx, self._services, self)
        self._worker = ctx.worker(ctx.device)
        self._ready = 0  # members at the swarm's position
        self._own_ready = False
        self._begun = False
        self._rate, self._counted = WorkRate(ctx.clock.now()), 0
        part.role = self

    # --- life -------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._desk.told = self._came_in
        self._rate = WorkRate(self._ctx.clock.now())
        offer = await self._open_offer()
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._member.run)
                nursery.start_soon(self._watch_settings)
                nursery.start_soon(self._contributor.publish_now_and_then)
                task_status.started()
                await self._contributor.follow()
                nursery.cancel_scope.cancel()
        finally:
            offer.close()

    async def _open_offer(self) -> RunOffer:
        """Offer the run file to helpers and backbones that join by this peer's link."""
        run, file, signature = self._run, shared_file(self._run), b""
        path = self._ctx.data_dir.parent / SIGNATURE_FILE
        try:
            signature = await trio.to_thread.run_sync(own_signature, run, file, self._ctx.host, path)
        except ConfigError as error:
            self._ctx.log.event("run.not_signed", level="warning", reason=str(error))
        offer = RunOffer(self._ctx.rpc, run.run, lambda: RunFileAnswer(file, signature))
        offer.open()
        return offer

    async def leave(self) -> None:
        """Release microbatches that are not computed, wait until the step that contains ours ends, and leave.

        If no member that stays has this peer's state, first wait until a backbone and members that are behind have it.
        """
        await self._contributor.hand_in(unfinished=False)
        await self._final.handed_over()
        await self._member.leave()
        await self._contributor.say_goodbye()

    @property
    def unsaved(self) -> str | None:
        """As `StageMember.unsaved`; also reports a wait for other peers to fetch the state."""
        return f"waiting for {self._final.waits_for}" if self._final.waits_for else self._member.unsaved

    def status(self) -> dict[str, object]:
        waits_for = self._final.waits_for or self._contributor.waits_for
        if not waits_for and not self._begun:
            waits_for = f"{self._min_peers} peers to begin with; {self._ready} are ready"
        return {
            "step": self._model.step,
            "next_step_in_s": self._services.following.step_in_s,
            "peers": self._ready,
            "samples_per_s": self._rate.at(self._ctx.clock.now()),
            "microbatches": self._contributor.counts(),
            "late": self._desk.counts.late,
            "not_finite": self._desk.counts.not_finite,
            "member": self._member.status(),
            "waits_for": waits_for,
        }

    async def _watch_settings(self) -> None:
        """Compare settings until the first step: peers that start together may not have published theirs yet."""
        while not self._begun:
            await trio.sleep(_SETTINGS_S)
            await self._services.settings.compare()

    def _came_in(self) -> None:
        if not self._contributor.books.open():
            self._contributor.tell()

    @asynccontextmanager
    async def _changing(self, patient: bool) -> AsyncIterator[None]:
        async with self._desk.changing(patient):
            try:
                yield
            finally:
                if self._model.failure is not None:
                    self._desk.fail(self._model.failure)

    # --- microbatches ------------------------------------------------------------------------------------------

    def in_flight(self) -> int:
        """One microbatch, in a delayed run also the next one; 0 while the user cannot compute for the current step."""
        ahead = self._post.step - self._contributor.books.step  # the answer with a new step may come after we made it
        delay = int(self._run.optimizer.delayed)
        here = 0 <= ahead <= delay
        return 1 + delay if self._begun and self._own_ready and self._desk.useful and here else 0

    def told_together(self) -> int:
        """One: a user's loop has few microbatches, so each is reported at once."""
        return 1

    def refill(self, waiting: list[UserTurn]) -> None:
        """Keep one user's turn waiting, since there is always a next one."""
        if not waiting:
            waiting.append(UserTurn())

    async def train(self, step: int, seq: int, load: UserTurn) -> list[Holding]:
        """Let the user compute a gradient for microbatch `seq` and add it to the sum."""
        mb = Mb(self._ctx.host.id.text, seq)
        while True:
            async with self._desk.gradients(lambda: self._post.state.origins, step) as handed_in:
                with trio.CancelScope(shield=True):  # the user must stay inside while their tensors are read
                    added = await self._add(step, mb, handed_in)
            if added:
                return [Holding(mb.trainer, self._post.receipt(step, mb))]

    async def repeat(self, step: int, seq: int, stage: int, load: UserTurn) -> Holding:
        """Compute a replacement: the gradient was lost with its sum, and any gradient may bear the same number."""
        return (await self.train(step, seq, load))[0]

    @property
    def _post(self) -> Post:
        post = self._member.post
        assert post is not None
        return post

    async def _add(self, step: int, mb: Mb, handed_in: HandedGradient) -> bool:
        add = partial(self._model.add, step, mb, handed_in.gradients, handed_in.samples)
        try:
            added = await self._worker.run(add, name="add")
        except Stale:
            self._desk.counts.late += 1
            return False
        self._rate.worked(self._ctx.clock.now())
        self._desk.counts.not_finite += not added  # found only now; see `AveragingOptimizer.step`
        return added

    def dropped(self, step: int, load: UserTurn, error: MicrobatchNotFinite) -> None:
        """Never called: a gradient that is not finite is an error in the user's own loop."""

    def note_members(self, members: list[MemberInfo]) -> None:
        """Count the members at the swarm's position, and record whether this peer is one of them."""
        ready = {m.peer for m in members if m.ready}
        self._ready, self._own_ready = len(ready), self._ctx.host.id.text in ready
        self._begun = self._begun or self._ready >= self._min_peers
        self._desk.look_again()

    def stepped(self, before: int) -> None:
        """Update the rate of our own samples that counted."""
        counted = self._contributor.books.tally.counted
        self._rate.stepped(self._ctx.clock.now(), (counted - self._counted) * self._samples)
        self._counted = counted

    def answered(self, answer: TrainerAnswer) -> None:
        """Does nothing: evaluation is up to the user."""

    def progress(self) -> TrainerProgress:
        """Our record for the directory. It has no losses, because only the user knows them."""
        tally = self._contributor.books.tally
        return TrainerProgress(
            step=self._model.step,
            loss=math.nan,
            valid_loss=math.nan,
            valid_step=0,
            samples_per_s=self._rate.at(self._ctx.clock.now()),
            tokens_per_s=0.0,
            microbatches=tally.counted,
            redone=tally.redone,
            lost=tally.lost,
            waits_for=str(self.status()["waits_for"] or "")[:200],
        )


def role_for(user: UserPart) -> type[AveragerRole]:
    """Make the role class of this user."""

    class Bound(AveragerRole):
        part = user

    return Bound
