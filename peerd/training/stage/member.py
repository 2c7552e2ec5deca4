"""A peer's posts in a run: chooses its stages, enters and leaves them, and tallies their contributions. Not a role.

It is role `stage`; role `trainer` holds one where the model is one stage: a replica of its own; with `ExternalModel` it
is a user's model, whose gradients the user alone computes. Stages are the run file's (`limits.stage`), and then it
stays there; else the one that needs a peer most, and this peer may move later on (`moving`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import trio

from peerd.core.errors import LocalError
from peerd.core.limits import POSTS
from peerd.core.messages.swarm import MemberInfo, Position
from peerd.core.run.runfile import RunFile
from peerd.core.run.stage_plan import planned_stage
from peerd.machine.swarm.roster import START
from peerd.role import RoleContext
from peerd.signals import Signal
from peerd.training.checkpoints.stage_checkpoints import StageCheckpoints
from peerd.training.stage.external_model import ExternalModel
from peerd.training.stage.moving import StageMove
from peerd.training.stage.post import Post


@dataclass(slots=True, eq=False)
class _Held:
    """One post, and the task that serves it."""

    post: Post
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    begun: bool = False
    ended: trio.Event = field(default_factory=trio.Event)


class StageMember:
    """See the module's header. `run`, `leave` and `status` are as in `peerd.role.Role`."""

    def __init__(self, ctx: RoleContext, own: ExternalModel | None = None) -> None:
        assert ctx.run is not None
        assert ctx.services is not None
        self._ctx, self._own = ctx, own
        self._run: RunFile = ctx.run
        self._services = ctx.services
        self._tally = self._services.tally("stage", ctx.data_dir / "contributed.json", ctx.worker("files"))
        self._arrived_at = ctx.clock.wall()
        self._placing = self._services.placing()
        self._held: dict[int, _Held] = {}  # by stage, in the order in which they were entered
        self._entered = Signal()  # a post is there
        self._moving = StageMove(ctx, self._services, self._placing, self)
        self._moves = trio.CancelScope()
        self._nursery: trio.Nursery | None = None

    # --- life -------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve stages until cancelled."""
        await self._services.compare_settings()
        async with trio.open_nursery() as nursery:
            if self._run.pipeline.stages > 1:
                nursery.start_soon(self._placing.answer, self._serving)
            stages = self._run.limits.stages or [await self.choose()]
            self._nursery = nursery
            nursery.start_soon(self._services.keep_comparing)
            for stage in stages:
                await self.enter(stage)
            nursery.start_soon(self._tally.run)
            if self._own is None and self._run.experts is None:  # else trainers do not call it
                nursery.start_soon(self._services.calling_in().run)
            if self._is_free:
                nursery.start_soon(self._move)
            task_status.started()

    async def leave(self) -> None:
        """Leave every post gracefully, all at once."""
        self._moves.cancel()
        async with trio.open_nursery() as nursery:
            for held in self._held.values():
                nursery.start_soon(partial(self._end, held, ends=True))

    @property
    def unsaved(self) -> str | None:
        """The sentence on a state that would be lost if this process ended now, while it leaves; else None."""
        return next((found for post in self.posts if (found := post.unsaved) is not None), None)

    async def enter(self, stage: int) -> Post:
        """Serve `stage`, too, from now on; LocalError when this process does so already."""
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
        """Leave the post of `stage` gracefully, and serve it no more; returns when its task has ended."""
        await self.exit_if(stage, lambda: True)

    async def exit_if(self, stage: int, may_go: Callable[[], bool], patience_s: float | None = None) -> bool:
        """As `exit`, where the post may go when the step under way has ended, or after `patience_s`; else False."""
        held = self._held[stage]
        if not await self._end(held, may_go, patience_s):
            return False
        del self._held[stage]
        held.post.state.stepped.notify()  # for those that wait for its next position
        return True

    async def _end(
        self,
        held: _Held,
        may_go: Callable[[], bool] = lambda: True,
        patience_s: float | None = None,
        ends: bool = False,
    ) -> bool:
        if not held.begun:
            return True  # nobody knows of it, and the task that begins it would miss it
        if not await held.post.leave(patience_s, may_go, ends):
            return False
        held.scope.cancel()
        await held.ended.wait()  # the record goes after it: a post announces itself as long as it runs
        await self._services.directory.withdraw(held.post.stage)
        return True

    async def _serve(self, held: _Held, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            with held.scope:
                await held.post.run(task_status=task_status)
        finally:
            held.ended.set()

    # --- where it serves --------------------------------------------------------------------------------------

    async def _move(self) -> None:
        with self._moves:
            await self._placing.serves_now(self.announced)
            await self._moving.run()

    @property
    def _is_free(self) -> bool:
        """True when the stage is this peer's own choice, among several."""
        return self._run.pipeline.stages > 1 and not self._run.limits.stages

    @property
    def _planned(self) -> int | None:
        """The stage that the run's plan gives this peer, which no order takes it from; None if it names none."""
        return planned_stage(self._run, self._ctx.host.id.text)

    async def choose(self) -> int:
        """The stage to serve, by need; of a run of one stage that one."""
        if not self._is_free:
            return 0
        has = await StageCheckpoints(self._ctx, self._services.fingerprint).stages(self._run.pipeline.stages)
        stage, why = await self._placing.choose(self._arrived_at, has, self._planned)
        self._ctx.log.event("stage.chosen", stage=stage, why=why)
        return stage

    # --- what it holds ----------------------------------------------------------------------------------------

    @property
    def posts(self) -> list[Post]:
        """The posts that this member holds, the first entered first."""
        return [held.post for held in self._held.values()]

    async def announced(self) -> None:
        """Wait until the directory has a record of each post."""
        for post in self.posts:
            await post.announced.wait()

    def _serving(self) -> list[int]:
        return [stage for stage, held in self._held.items() if held.begun]

    @property
    def post(self) -> Post | None:
        """The first of its posts; None until it has chosen a stage."""
        return next(iter(self.posts), None)

    @property
    def stage(self) -> int:
        """The stage of the first post; below 0 until it has chosen."""
        return self.post.stage if self.post is not None else -1

    @property
    def step(self) -> int:
        """Number of global steps that the parameters of the first post have made."""
        return self.position.step

    @property
    def position(self) -> Position:
        """The position of the first post's parameters."""
        return self.post.state.position if self.post is not None else START

    async def moved(self) -> None:
        """Wait until the first post is at another position; where there is no post yet, until there is."""
        post = self.post
        await (post.state.stepped if post is not None else self._entered).wait()

    @property
    def members(self) -> list[MemberInfo]:
        """All members and helpers of the swarm, as the conductor listed them last to the first post."""
        return self.post.members if self.post is not None else []

    @property
    def built(self) -> bool:
        """True once the first post has its parameters."""
        return self.post is not None and self.post.state.built

    def _stepped(self, samples: int) -> None:
        self._tally.add(samples=samples, bytes_aggregated=self._services.averaging.newly_aggregated_bytes())

    def status(self) -> dict[str, object]:
        """The first post's status; all of them under `posts`, where there are several."""
        told = [post.status() for post in self.posts]
        if not told:
            return {"stage": -1, "step": 0, "waits_for": self._services.view.waits_for() or "a stage to serve"}
        waits = [str(one["waits_for"]) for one in told if one["waits_for"]]
        going = {"moves": self._moving.under_way} if self._moving.under_way else {}
        more = {"posts": told, "waits_for": "; ".join(dict.fromkeys(waits)) or None} if len(told) > 1 else {}
        return told[0] | more | going
