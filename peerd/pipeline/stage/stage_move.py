"""Moves a member to another stage: by the conductor's order, or to a stage that has lost its peers.

Only members that chose their stage themselves move. An ordered move keeps the old post until the new one is ready, if
memory suffices for both: the peer enters the new stage, downloads and checks its state, and only then leaves the old
post. Otherwise it leaves the old post first. If a move fails, the peer stays in its old stage; if it had left that
already, it chooses a stage as a newcomer does. A peer that its stage cannot spare does not move, even if ordered:
because it conducts, no stage-mate has the current state, or the mates disappear before it can leave. Hostile input:
orders come only from the conductor that this peer follows; a peer obeys at most one order per AGAIN_S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import trio

from peerd.core.errors import PeerdError, Refused
from peerd.core.limits import SLOW_LINE_BYTES_PER_S
from peerd.core.signals import Signal
from peerd.model.shapes.stage_memory import StageFootprint
from peerd.model.stage.footprint import footprint, lacking
from peerd.pipeline.stage.post import Post
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.run.runfile import RunFile
from peerd.swarm.conductor.stage_finder import StageFinder
from peerd.swarm.rebalance.ordered_moves import AGAIN_S

_READY_WITHIN_S: Final = 600.0  # for the new stage's state, in addition to its transfer time
_LOOK_S: Final = 5.0  # between two checks of the received bytes
_LAST_STEP_S: Final = 120.0  # for the current step to end, once the new post serves


class Movable(Protocol):
    """What `StageMove` needs from the member that moves."""

    @property
    def posts(self) -> list[Post]: ...

    @property
    def step(self) -> int: ...

    async def enter(self, stage: int) -> Post: ...

    async def exit(self, stage: int) -> None: ...

    async def exit_if(self, stage: int, may_go: Callable[[], bool], patience_s: float | None = None) -> bool: ...

    async def choose(self) -> int:
        """The stage to serve, chosen as a newcomer does."""
        ...

    async def announced(self) -> None:
        """Wait until the directory has a record of each post."""
        ...


@dataclass(frozen=True, slots=True)
class _Order:
    """A move that the conductor has ordered."""

    source: int
    target: int
    why: str


class StageMove:
    """Moves one member from stage to stage, one move at a time."""

    def __init__(self, ctx: RoleContext, services: RunServices, placing: StageFinder, member: Movable) -> None:
        assert ctx.run is not None
        self._ctx, self._services, self._placing, self._member = ctx, services, placing, member
        self._run: RunFile = ctx.run
        self._following = services.following
        self._order: _Order | None = None
        self._ordered = Signal()
        self._one_at_a_time = trio.Lock()
        self._moved_at = float("-inf")
        self.under_way: str | None = None  # the running move, as text

    async def run(self) -> None:
        """Move when necessary, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._go_where_nobody_is)
            nursery.start_soon(self._obey)

    # --- to a stage that has lost its peers -------------------------------------------------------------------

    async def _go_where_nobody_is(self) -> None:
        """Move to a stage that has lost its peers, whenever this peer's turn comes."""
        while True:
            move = await self._placing.next_move(lambda: self._member.step)
            if self._order is not None or self._stages != [move.source]:
                continue
            async with self._one_at_a_time:
                why = f"stage {move.target} has had no peer for {move.empty_s:.0f} s, stage {move.source} has others"
                self._note("stage.moved", move.source, move.target, why)
                await self._placing.goes(move.target)
                await self._member.exit(move.source)
                await self._member.enter(move.target)
                self._moved_at = trio.current_time()
                await self._placing.serves_now(self._member.announced)

    # --- by order ---------------------------------------------------------------------------------------------

    def order(self, source: int, target: int, why: str) -> None:
        """Accept the conductor's order. Raises Refused if this peer must stay."""
        if self._order is not None or self._one_at_a_time.locked() or self._stages != [source]:
            raise Refused("this peer is moving to another stage already, or serves several stages")
        if trio.current_time() - self._moved_at < AGAIN_S:
            raise Refused(f"this peer has moved in the last {AGAIN_S:.0f} s")
        if self._services.conducting.acting:
            raise Refused("this peer conducts")
        if not self._is_spared(source):
            raise Refused(f"no other peer of stage {source} has the current state")
        self._order = _Order(source, target, why)
        self._ordered.notify()

    async def _obey(self) -> None:
        while True:
            if self._order is None:
                await self._ordered.wait()
                continue
            async with self._one_at_a_time:
                self.under_way = f"moves from stage {self._order.source} to stage {self._order.target}"
                await self._carry_out(self._order)
                self._order, self.under_way, self._moved_at = None, None, trio.current_time()

    async def _carry_out(self, order: _Order) -> None:
        source, target = order.source, order.target
        self._note("stage.move_begun", source, target, order.why)
        await self._placing.goes(target)
        keeps = await self._fits_beside(target)
        if not keeps:
            await self._member.exit(source)
        problem = await self._settle(target)
        if problem is None and keeps and not await self._leave(source):
            problem = f"stage {source} has lost its other peers meanwhile"
        if problem is None:
            self._note("stage.moved", source, target, order.why)
        else:
            await self._give_up(order, problem, keeps)
        await self._placing.serves_now(self._member.announced)

    async def _settle(self, target: int) -> str | None:
        """Enter `target` and wait until ready there. Returns the reason of a failure, or None."""
        try:
            size = await self._size_of(target)
            most_s = _READY_WITHIN_S + size.checkpoint_bytes / SLOW_LINE_BYTES_PER_S
            with trio.move_on_after(most_s):
                return await self._get_ready(await self._member.enter(target))
        except PeerdError as error:
            return str(error)
        return f"its state did not arrive within {most_s:.0f} s"

    async def _get_ready(self, post: Post) -> str | None:
        """Wait until the conductor lists the new post as ready. Returns the reason of a failure, or None."""
        received, since = post.catching_up.received_bytes, trio.current_time()
        while not self._is_ready(post.stage):
            with trio.move_on_after(_LOOK_S):
                await self._following.told.wait()
            if received != post.catching_up.received_bytes:
                received, since = post.catching_up.received_bytes, trio.current_time()
            elif trio.current_time() - since >= _READY_WITHIN_S:
                return f"nothing of its state arrived for {_READY_WITHIN_S:.0f} s"
        return None

    async def _leave(self, source: int) -> bool:
        """Leave the old post after the current step. Returns False if its stage can no longer spare this peer."""

        def may_go() -> bool:
            return self._is_spared(source) and not self._services.conducting.acting

        if not await self._placing.may_leave(source, self._mates(source)):
            return False
        left = await self._member.exit_if(source, may_go, _LAST_STEP_S)
        self._placing.stays()
        return left

    async def _give_up(self, order: _Order, problem: str, keeps: bool) -> None:
        """Undo a failed move: serve the source again, or, if this peer has left it, choose a stage as a newcomer."""
        level, facts = "warning", {"stage": order.target, "before": order.source, "reason": problem}
        self._ctx.log.event("stage.move_failed", level=level, **facts)
        if order.target in self._stages:
            await self._member.exit(order.target)
        if not keeps:
            try:
                stage = await self._member.choose()
            except PeerdError:
                stage = order.source
            await self._member.enter(stage)

    async def _fits_beside(self, target: int) -> bool:
        """True if this machine has memory for both posts."""
        taken = await self._size_of(target)
        return lacking(taken, self._ctx.device, self._run.limits.memory_gb * 1e9) is None

    async def _size_of(self, stage: int) -> StageFootprint:
        size = partial(footprint, self._run, stage)
        return await self._ctx.worker(self._ctx.device).run(size, name="see whether the stage fits")

    # --- queries ----------------------------------------------------------------------------------------------

    @property
    def _stages(self) -> list[int]:
        return [post.stage for post in self._member.posts]

    def _is_ready(self, stage: int) -> bool:
        own = self._ctx.host.id.text
        return any(m.ready and m.stage == stage and m.peer == own for m in self._following.members)

    def _is_spared(self, stage: int) -> bool:
        return bool(self._mates(stage))

    def _mates(self, stage: int) -> list[str]:
        """Other peers of `stage` with the current state, by the conductor's last list."""
        own = self._ctx.host.id.text
        return [m.peer for m in self._following.members if m.ready and m.stage == stage and m.peer != own]

    def _note(self, event: str, source: int, target: int, why: str) -> None:
        self._ctx.log.event(event, stage=target, before=source, why=why)
