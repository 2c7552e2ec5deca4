"""A peer's posts (stages that it serves) in a run: chooses, enters and leaves them, and counts their contributions.

Not a role itself. Role `stage` runs one. Role `trainer` runs one if the model has a single stage: a replica of its own.
With `ExternalModel` it serves a user's model, and only the user computes its gradients. If the run file sets the stages
(`limits.stage`), the peer stays there; else it chooses the stage that needs a peer most, and may move later
(`stage_move`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from peerd.core.errors import LocalError
from peerd.core.limits import POSTS
from peerd.core.signals import Signal
from peerd.messages.swarm import MemberInfo, Position
from peerd.pipeline.stage.external_model import ExternalModel
from peerd.pipeline.stage.post import Post
from peerd.pipeline.stage.stage_move import StageMove
from peerd.role.role import RoleContext
from peerd.run.runfile import RunFile
from peerd.run.stage_plan import planned_stage
from peerd.state.checkpoints.stage_checkpoints import StageCheckpoints
from peerd.swarm.roster import START


@dataclass(slots=True, eq=False)
class _Held:
    """One post, and the task that serves it."""

    post: Post
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    begun: bool = False
    ended: trio.Event = field(default_factory=trio.Event)


class StageMember:
    """The posts of one peer. `run`, `leave` and `status` are as in `peerd.role.role.Role`."""

    def __init__(self, ctx: RoleContext, own: ExternalModel | None = None) -> None:
        assert ctx.run is not None
        assert ctx.services is not None
        self._ctx, self._own = ctx, own
        self._run: RunFile = ctx.run
        self._services = ctx.services
        self._tally = self._services.tally("stage", ctx.data_dir / "contributed.json", ctx.worker("files"))
        self._arrived_at = ctx.clock.wall()
        self._placing = self._services.placing()
        self._held: dict[int, _Held] = {}  # by stage, in the order of entering
        self._entered = Signal()  # a post was entered
        self._moving = StageMove(ctx, self._services, self._placing, self)
        self._moves = trio.CancelScope()
        self._nursery: trio.Nursery | None = None

    # --- life -------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve stages until cancelled."""
        await self._services.settings.compare()
        async with trio.open_nursery() as nursery:
            if self._run.pipeline.stages > 1:
                nursery.start_soon(self._placing.answer, self._serving)
            stages = self._run.limits.stages or [await self.choose()]
            self._nursery = nursery
            nursery.start_soon(self._services.settings.keep_comparing)
            for stage in stages:
                await self.enter(stage)
            nursery.start_soon(self._tally.run)
            if self._own is None and self._run.experts is None:  # else trainers do not call it
                nursery.start_soon(self._services.calling_in().run)
            if self._is_free:
                nursery.start_soon(self._move)
            task_status.started()

    async def leave(self) -> None:
        """Leave all posts gracefully and concurrently."""
        self._moves.cancel()
        async with trio.open_nursery() as nursery:
            for held in self._held.values():
                nursery.start_soon(partial(self._end, held, ends=True))

    @property
    def unsaved(self) -> str | None:
        """A sentence on a state that would be lost if this process ended now, while the peer leaves; else None."""
        return next((found for post in self.posts if (found := post.unsaved) is not None), None)

    async def enter(self, stage: int) -> Post:
        """Start to serve `stage` as well. Raises LocalError if this process already serves it, or serves too many
        stages.
        """
        assert self._nursery is not None
        if stage in self._held:
            raise LocalError(f"stage {stage} is served by this process already")
        if len(self._held) >= POSTS:
            raise LocalError(f"this process serves {POSTS} stages already")
        held = self._held[stage] = _Held(Post(self._ctx, self._services, stage, self._own))
        held.post.stepped = self._stepped
        if self._is_free and stage != self._planned:
            held.post.moves_to = partial(self._moving.order, stage)
        self._entered.notify()
        try:
            await self._nursery.start(self._serve, held)
            held.begun = True
        finally:
            if not held.begun:
                del self._held[stage]
        return held.post

    async def exit(self, stage: int) -> None:
        """Leave the post of `stage` gracefully. Returns when its task has ended."""
        await self.exit_if(stage, lambda: True)

    async def exit_if(self, stage: int, may_go: Callable[[], bool], patience_s: float | None = None) -> bool:
        """Like `exit`, but only if `may_go` allows it once the current step has ended or `patience_s` has passed.

        Returns False if the post stays.
        """
        held = self._held[stage]
        if not await self._end(held, may_go, patience_s):
            return False
        del self._held[stage]
        held.post.state.stepped.notify()  # wakes tasks that wait for its next position
        return True

    async def _end(
        self,
        held: _Held,
        may_go: Callable[[], bool] = lambda: True,
        patience_s: float | None = None,
        ends: bool = False,
    ) -> bool:
        if not held.begun:
            return True  # not announced yet, and `enter` still waits for it
        if not await held.post.leave(patience_s, may_go, ends):
            return False
        held.scope.cancel()
        await held.ended.wait()  # withdraw only now: a running post would announce itself again
        await self._services.directory.withdraw(held.post.stage)
        return True

    async def _serve(self, held: _Held, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            with held.scope:
                await held.post.run(task_status=task_status)
        finally:
            held.ended.set()

    # --- choice of stage --------------------------------------------------------------------------------------

    async def _move(self) -> None:
        with self._moves:
            await self._placing.serves_now(self.announced)
            await self._moving.run()

    @property
    def _is_free(self) -> bool:
        """True if this peer chooses its stage itself, among several."""
        return self._run.pipeline.stages > 1 and not self._run.limits.stages

    @property
    def _planned(self) -> int | None:
        """The stage that the run's plan assigns to this peer, or None. No order moves the peer away from it."""
        return planned_stage(self._run, self._ctx.host.id.text)

    async def choose(self) -> int:
        """The stage to serve: the one that needs a peer most, or 0 in a run with one stage."""
        if not self._is_free:
            return 0
        has = await StageCheckpoints(self._ctx, self._services.fingerprint).stages(self._run.pipeline.stages)
        stage, why = await self._placing.choose(self._arrived_at, has, self._planned)
        self._ctx.log.event("stage.chosen", stage=stage, why=why)
        return stage

    # --- the posts --------------------------------------------------------------------------------------------

    @property
    def posts(self) -> list[Post]:
        """The posts of this member, the first entered first."""
        return [held.post for held in self._held.values()]

    async def announced(self) -> None:
        """Wait until the directory has a record of each post."""
        for post in self.posts:
            await post.announced.wait()

    def _serving(self) -> list[int]:
        return [stage for stage, held in self._held.items() if held.begun]

    @property
    def post(self) -> Post | None:
        """The first of the posts, or None until the peer has chosen a stage."""
        return next(iter(self.posts), None)

    @property
    def stage(self) -> int:
        """The stage of the first post; -1 until the peer has chosen one."""
        return self.post.stage if self.post is not None else -1

    @property
    def step(self) -> int:
        """Number of global steps in the parameters of the first post."""
        return self.position.step

    @property
    def position(self) -> Position:
        """The position of the first post's parameters."""
        return self.post.state.position if self.post is not None else START

    async def moved(self) -> None:
        """Wait until the first post is at another position, or, without a post, until one is entered."""
        post = self.post
        await (post.state.stepped if post is not None else self._entered).wait()

    @property
    def members(self) -> list[MemberInfo]:
        """All members and helpers of the swarm, as the conductor last listed them to the first post."""
        return self.post.members if self.post is not None else []

    @property
    def built(self) -> bool:
        """True once the first post has its parameters."""
        return self.post is not None and self.post.state.built

    def _stepped(self, samples: int) -> None:
        self._tally.add(samples=samples, bytes_aggregated=self._services.averaging.newly_aggregated_bytes())

    def status(self) -> dict[str, object]:
        """The first post's status. If there are several posts, `posts` has the status of each."""
        told = [post.status() for post in self.posts]
        if not told:
            return {"stage": -1, "step": 0, "waits_for": self._services.view.waits_for() or "a stage to serve"}
        waits = [str(one["waits_for"]) for one in told if one["waits_for"]]
        going = {"moves": self._moving.under_way} if self._moving.under_way else {}
        more = {"posts": told, "waits_for": "; ".join(dict.fromkeys(waits)) or None} if len(told) > 1 else {}
        return told[0] | more | going
