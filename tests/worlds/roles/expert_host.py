"""A role that hosts every expert of a run, plainly: each call is one job, nothing merges, nothing is kept."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import trio

from peerd.experts.model.hosted_expert import HostedExpert
from peerd.messages.experts import Backward, Forward, Gradient, Output
from peerd.role.role import RoleContext
from peerd.rpc.rpc import Answer, Incoming
from peerd.run.grid import Uid, grid_of
from tests.kit.declared import declared
from tests.worlds.network.expertworld import announcements


class PlainHost:
    """See the module's header."""

    name: ClassVar[str] = "expert"
    needs_run: ClassVar[bool] = True

    def __init__(self, ctx: RoleContext) -> None:
        assert ctx.run is not None
        self._ctx, self._run, self._grid = ctx, ctx.run, grid_of(ctx.run)
        self._worker = ctx.worker(ctx.device)
        self.experts: dict[Uid, HostedExpert] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        assert self._ctx.services is not None
        assert self._run.experts is not None
        limits = declared(frames=2, frame_bytes=1 << 20)
        self._ctx.rpc.serve("expert/1/forward", Forward, self._forward, declared=limits)
        self._ctx.rpc.serve("expert/1/backward", Backward, self._backward, declared=limits)
        everything = [self._grid.uid(n) for n in range(self._grid.layers * self._grid.places)]
        task_status.started()
        while True:
            records = announcements(self._grid, everything, addrs=self._ctx.services.directory.own_addrs())
            await self._ctx.services.experts.announce(records)
            await trio.sleep(self._run.experts.announce_s)

    async def leave(self) -> None:
        """It holds nothing that is of use to others."""

    def status(self) -> dict[str, object]:
        return {"hosted": len(self.experts), "waits_for": None}

    def _expert(self, uid: Uid) -> HostedExpert:
        if uid not in self.experts:
            self.experts[uid] = HostedExpert(self._run, uid, self._ctx.device)
        return self.experts[uid]

    async def _forward(self, call: Incoming[Any]) -> Answer[Any]:
        expert = await self._worker.run(partial(self._expert, call.body.expert.uid), name="find the expert")
        frames = await self._worker.run(partial(expert.forward, list(call.frames)), name="expert")
        return Answer(Output(0, expert.version), tuple(frames))

    async def _backward(self, call: Incoming[Any]) -> Answer[Any]:
        expert = await self._worker.run(partial(self._expert, call.body.expert.uid), name="find the expert")
        pair = (call.frames[0], call.frames[1])
        frames = await self._worker.run(partial(expert.backward, [pair]), name="expert")
        return Answer(Gradient(0, expert.version), tuple(frames))
