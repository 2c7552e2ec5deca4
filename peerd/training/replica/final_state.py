"""FinalState: what a replica waits for, when its run has made all its steps, before its process ends.

First it waits for the finished model: a replica that rested or lagged behind downloads it from the others. Then it
waits for a backbone to keep the model, and for members that lack it, because after the last replica has left, no peer
can serve it. Each wait ends when no bytes flow for 120 s, or after a time that grows with the state's size; the log
names what is missing. A stranger that claims to be a backbone or a member, and fetches nothing, delays the end by 120
s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from peerd.role import RoleContext
from peerd.service.run_services import RunServices
from peerd.training.stage.member import StageMember

_SILENT_S: Final = 120.0  # without a piece of a state; on a slow line one piece takes long
_SLOW_LINE_BYTES_PER_S: Final = 125_000.0
_LOOK_S: Final = 1.0


class FinalState:
    """The final state of one replica. `waits_for` is what it waits for, as text."""

    def __init__(self, ctx: RoleContext, services: RunServices, replica: StageMember) -> None:
        self._ctx, self._services, self._replica = ctx, services, replica
        self.waits_for: str | None = None

    async def fetched(self, step: int) -> None:
        """Wait until this replica has the model of the run's last `step`, or until it cannot be fetched."""
        post = self._replica.post
        if post is None or not post.state.built:
            return
        try:
            await self._fetch(step)
        finally:
            self.waits_for = None

    async def given(self, step: int) -> None:
        """Wait until a backbone, if there is one, keeps the final state and the other members have it."""
        post = self._replica.post
        if post is None or post.step != step:
            return
        try:
            await self._until_kept()
            await self._until_all_have_it()
        finally:
            self.waits_for = None

    async def _fetch(self, step: int) -> None:
        """Wait for the replica to reach the others' last step."""
        post = self._replica.post
        assert post is not None
        self.waits_for = f"the finished model, of step {step}"
        found = await self._while_bytes_flow(lambda: post.step >= step, lambda: post.catching_up.received_bytes)
        if not found:
            told = f"this peer has the model of step {post.step}, not of the run's last step {step}"
            self._ctx.log.event("final.not_fetched", level="warning", reason=told)

    async def _until_kept(self) -> None:
        """Wait until a backbone that keeps the run's checkpoints has the last one."""
        post, directory = self._replica.post, self._services.directory
        assert post is not None
        await directory.refresh()
        if not directory.keeping:
            return
        self.waits_for = "a backbone to fetch the finished model"
        position = post.state.position
        kept = await self._while_bytes_flow(
            lambda: bool(directory.keepers(position)), lambda: post.catching_up.given_bytes
        )
        if not kept:
            told = f"no backbone has fetched the finished model: it is in {post.saving.directory}"
            self._ctx.log.event("final.not_kept", level="warning", reason=told)
        for keeper in directory.keepers(position):
            self._ctx.log.event("final.kept", by=keeper.text)

    async def _until_all_have_it(self) -> None:
        """Wait for members that are behind, as long as they fetch the finished model from us."""
        post, own = self._replica.post, self._ctx.host.id.text
        assert post is not None
        self.waits_for = "members that are behind to fetch the finished model"

        def all_have_it() -> bool:
            return all(m.ready or m.peer == own for m in post.members if m.since)

        await self._while_bytes_flow(all_have_it, lambda: post.catching_up.given_bytes)

    async def _while_bytes_flow(self, done: Callable[[], bool], count: Callable[[], int]) -> bool:
        """Wait until `done`. Returns False if it gave up: `count` did not grow for 120 s, or the time limit passed."""
        post = self._replica.post
        assert post is not None
        size = sum(spec.nbytes for spec in await post.state.work(post.state.model.outline, "outline the state"))
        before, since = count(), trio.current_time()
        with trio.move_on_after(_SILENT_S + 2 * size / _SLOW_LINE_BYTES_PER_S):
            while not done():
                if count() != before:
                    before, since = count(), trio.current_time()
                elif trio.current_time() - since > _SILENT_S:
                    break
                await trio.sleep(_LOOK_S)
                await self._services.directory.refresh()
        return done()
