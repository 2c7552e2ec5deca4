"""FinalState: what a replica waits for before its process ends, once its run is complete or its user's loop ends.

First it waits for the finished model: a replica that rested or lagged behind downloads it from the others. Then it
waits for a backbone to keep the model, and for members that lack it, because after the last replica has left, no peer
can serve it. A user's own loop ends at any step, when its user decides. It waits for a backbone and for members in the
same way, unless another member that stays has the state.

Each wait ends when no bytes flow for 120 s, or after a time that grows with the state's size; the log names what is
missing. A stranger that claims to be a backbone or a member, and fetches nothing, delays the end by 120 s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from peerd.core.ids import PeerId
from peerd.core.limits import SLOW_LINE_BYTES_PER_S
from peerd.pipeline.stage.member import StageMember
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices

_SILENT_S: Final = 120.0  # without a piece of a state; on a slow line one piece takes long
_LOOK_S: Final = 1.0


class FinalState:
    """Waits until the final state of one replica is safe. `waits_for` is what it waits for, as text."""

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
            await self._until_kept(lambda: False)
            await self._until_all_have_it(lambda: False)
        finally:
            self.waits_for = None

    async def handed_over(self) -> None:
        """Wait, before this peer leaves, until a backbone and the other members have its state.

        Does not wait if a member that stays has the state. If several members leave at the same time, each announces
        that before it reads the others' announcements, so no two of them rely on each other. The checkpoint is written
        meanwhile.
        """
        post = self._replica.post
        if post is None or not post.state.built or not post.step:
            return
        self.waits_for = f"the directory to show which peers have the state of step {post.step}"
        try:
            await post.announce_end()
            await post.state.save()
            await self._until_kept(self._is_held_by_others)
            await self._until_all_have_it(self._is_held_by_others)
        finally:
            self.waits_for = None

    def _is_held_by_others(self) -> bool:
        """True while another member that does not leave has this peer's state."""
        post, own = self._replica.post, self._ctx.host.id.text
        assert post is not None
        staying = {entry.peer.text for entry in self._services.directory.announced.values() if not entry.progress.ends}
        return any(m.ready and m.peer != own and m.peer in staying for m in post.members)

    async def _fetch(self, step: int) -> None:
        """Wait for the replica to reach the others' last step."""
        post = self._replica.post
        assert post is not None
        self.waits_for = f"the finished model, of step {step}"
        found = await self._while_bytes_flow(lambda: post.step >= step, lambda: post.catching_up.received_bytes)
        if not found:
            told = f"this peer has the model of step {post.step}, not of the run's last step {step}"
            self._ctx.log.event("final.not_fetched", level="warning", reason=told)

    async def _until_kept(self, enough: Callable[[], bool]) -> None:
        """Wait until a backbone that keeps the run's checkpoints has the last one. Also ends once `enough` returns True
        or no backbone is announced any longer.
        """
        post, directory = self._replica.post, self._services.directory
        assert post is not None
        await directory.refresh()
        if not directory.keeping:
            return
        self.waits_for = f"a backbone to fetch {self._what}"

        def keepers() -> list[PeerId]:
            return directory.keepers(post.state.position)

        def is_over() -> bool:
            return bool(keepers()) or enough() or not directory.keeping

        await self._while_bytes_flow(is_over, lambda: post.catching_up.given_bytes)
        if not keepers() and not enough():
            kept_here = post.state.keeps_checkpoints
            place = f"it is in {post.saving.directory}" if kept_here else "it is not saved, because data_dir is not set"
            told = f"no backbone has fetched {self._what}: {place}"
            self._ctx.log.event("final.not_kept", level="warning", reason=told)
        for keeper in keepers():
            self._ctx.log.event("final.kept", by=keeper.text)

    async def _until_all_have_it(self, enough: Callable[[], bool]) -> None:
        """Wait for members that are behind, as long as they fetch the state from us. Also ends once `enough` returns
        True.
        """
        post, own = self._replica.post, self._ctx.host.id.text
        assert post is not None
        self.waits_for = f"members that are behind to fetch {self._what}"

        def all_have_it() -> bool:
            return enough() or all(m.ready or m.peer == own for m in post.members if m.since)

        await self._while_bytes_flow(all_have_it, lambda: post.catching_up.given_bytes)

    @property
    def _what(self) -> str:
        """The state that others must have before this peer leaves, as text."""
        post, total = self._replica.post, self._services.run.optimizer.total_steps
        assert post is not None
        return "the finished model" if post.step == total else f"the state of step {post.step}"

    async def _while_bytes_flow(self, done: Callable[[], bool], count: Callable[[], int]) -> bool:
        """Wait until `done`. Returns False if it gave up: `count` did not grow for 120 s, or the time limit passed."""
        post = self._replica.post
        assert post is not None
        size = sum(spec.nbytes for spec in await post.state.work(post.state.model.outline, "outline the state"))
        before, since = count(), trio.current_time()
        with trio.move_on_after(_SILENT_S + 2 * size / SLOW_LINE_BYTES_PER_S):
            while not done():
                if count() != before:
                    before, since = count(), trio.current_time()
                elif trio.current_time() - since > _SILENT_S:
                    break
                await trio.sleep(_LOOK_S)
                await self._services.directory.refresh()
        return done()
