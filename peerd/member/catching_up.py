"""How a member that stands elsewhere than the swarm gets there: the state of its stage, from its stage-mates.

Also the other side of it: what this peer gives to those who come later. Invariants: the member's parameters change
only in its own hands (`Joiner`), whole, and by what most donors vouch for. A hostile donor: see `service.snapshot`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import trio
from torch import Tensor

from peerd.compute.served import Model, state_of
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.core.training import MemberInfo, Position, StateRequest
from peerd.core.work import Worker
from peerd.role import RoleContext, StateItem, Training

T = TypeVar("T")

_PAUSE_S = 0.5  # after a download that failed, or while there is no donor


class Joiner(Protocol):
    """The member that catches up."""

    @property
    def position(self) -> Position:
        """Where its parameters stand."""
        ...

    @property
    def model(self) -> Model:
        """What it holds."""
        ...

    @property
    def moving(self) -> trio.Lock:
        """Held by whoever changes or copies the parameters."""
        ...

    @property
    def members(self) -> list[MemberInfo]:
        """All of the swarm, as the conductor told last."""
        ...

    async def work(self, job: Callable[[], T], name: str) -> T:
        """Run a job on the model's device."""
        ...

    async def take_over(self, position: Position, state: dict[str, Tensor]) -> None:
        """Go to `position` with a whole state; ValueError when it does not fit."""
        ...


class CatchingUp:
    """One member's downloads, and what it gives to others. Serves nothing before `offer`."""

    def __init__(self, ctx: RoleContext, training: Training, coding: Worker, joiner: Joiner) -> None:
        self.waits_for: str | None = None
        self._ctx, self._training, self._coding, self._joiner = ctx, training, coding, joiner
        self._snapshots = training.snapshots()
        self._snapshots.notes = lambda text: ctx.log.event("download", note=text)
        self._turn = int.from_bytes(ctx.clock.secure_bytes(6), "big")
        self._stage = -1

    def offer(self, stage: int) -> None:
        """From now on give our state to others of our stage."""
        self._stage = stage
        joiner, run = self._joiner, self._training.fingerprint
        self._snapshots.offer(run, stage, self.freeze, self._coding, lambda: joiner.position)

    async def catch_up(self, current: Position) -> bool:
        """The swarm stands elsewhere: take the state of a stage-mate. True when we moved."""
        if not self._donors():
            self.waits_for = f"a peer of stage {self._stage} with the state of step {current.step}"
            await trio.sleep(_PAUSE_S)
            return False
        self.waits_for = f"the state of step {current.step} from a stage-mate"
        expected = await self._joiner.work(lambda: self._joiner.model.outline(), "outline the state")
        request = StateRequest(self._training.fingerprint, self._stage)
        try:
            position, items = await self._snapshots.fetch(self._donors, request, expected, self._coding)
            state = state_of((item.name, item.dtype, item.shape, item.payload) for item in items)
            await self._joiner.take_over(position, state)
        except (RemoteError, ValueError) as error:
            self._ctx.log.event("download failed", level="warning", stage=self._stage, reason=str(error))
            await trio.sleep(_PAUSE_S)
            return False
        finally:
            self.waits_for = None
        self._ctx.log.event("downloaded", stage=self._stage, step=position.step)
        return True

    def _donors(self) -> list[PeerId]:
        """Stage-mates that have the state; each joiner begins with another, so that none has to serve them all."""
        own = self._ctx.host.id.text
        names = [m.peer for m in self._joiner.members if m.ready and m.stage == self._stage and m.peer != own]
        turn = self._turn % max(1, len(names))
        return [PeerId.parse(name) for name in names[turn:] + names[:turn]]

    async def freeze(self) -> tuple[Position, list[StateItem]]:
        """What a donor gives: a copy of the state and the position it belongs to."""
        async with self._joiner.moving:
            items = await self._joiner.work(lambda: self._joiner.model.describe(), "freeze the state")
            return self._joiner.position, [StateItem(*item) for item in items]
