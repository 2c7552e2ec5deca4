"""Role `library` of a user's training loop with expert layers: transports their calls and does nothing else.

Its peer is only a client of the run: it trains no trunk, has no place in a batch and never contacts the conductor.
Created by `peerd.library`, not by name. Runs until it is stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import trio

from peerd.experts.calls.blocking import BlockingExperts
from peerd.role.role import RoleContext


@dataclass(slots=True)
class CallerPart:
    """The user's side of the role. `opened` is called on the loop when experts can be called."""

    opened: Callable[[BlockingExperts], None]
    role: ExpertCallsRole | None = None  # the running one


class ExpertCallsRole:
    """Role that makes expert calls for a user's own loop; `calls_role_for` makes a subclass for each user."""

    name: ClassVar[str] = "library"
    acts_as: ClassVar[str] = "trainer"  # in a run with tokens: the role that may call experts
    needs_run: ClassVar[bool] = True
    part: ClassVar[CallerPart]

    def __init__(self, ctx: RoleContext) -> None:
        assert ctx.services is not None
        self._services = ctx.services
        self._client = ctx.services.expert_calls(ctx.worker("coding"))
        self.part.role = self

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._services.settings.compare()
        calls = BlockingExperts(self._client)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(self._services.experts.run)
                self.part.opened(calls)
                task_status.started()
                await trio.sleep_forever()
        finally:
            calls.close()

    async def leave(self) -> None:
        """Does nothing: there is no unfinished work, since each update is complete once its call was answered."""

    def status(self) -> dict[str, Any]:
        return {"experts": self._client.status(), "waits_for": None}


def calls_role_for(user: CallerPart) -> type[ExpertCallsRole]:
    """Make the role class of this user."""

    class Bound(ExpertCallsRole):
        part = user

    return Bound
