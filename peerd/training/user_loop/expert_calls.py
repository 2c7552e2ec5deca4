"""Role `library` of a user's loop that has layers of experts: carries their calls, and nothing else.

Its peer is a client of the run: it trains no trunk, holds no place in a batch and never touches the conductor. Built
by `peerd.library`, not by name. Ends when it is told to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import trio

from peerd.role import RoleContext
from peerd.service.experts.blocking import BlockingExperts


@dataclass(slots=True)
class CallerPart:
    """The user's side of the role: `opened` is called on the loop when calls can be made."""

    opened: Callable[[BlockingExperts], None]
    role: ExpertCallsRole | None = None  # the one at work


class ExpertCallsRole:
    """See the module's header. Each user gets a class of their own by `calls_role_for`."""

    name: ClassVar[str] = "library"
    acts_as: ClassVar[str] = "trainer"  # in a run with tokens: who may call experts
    needs_run: ClassVar[bool] = True
    part: ClassVar[CallerPart]

    def __init__(self, ctx: RoleContext) -> None:
        assert ctx.services is not None
        self._services = ctx.services
        self._client = ctx.services.expert_calls(ctx.worker("coding"))
        self.part.role = self

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self._services.compare_settings()
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
        """Nothing to hand in: an update was made, or not, when its call was answered."""

    def status(self) -> dict[str, Any]:
        return {"experts": self._client.status(), "waits_for": None}


def calls_role_for(user: CallerPart) -> type[ExpertCallsRole]:
    """A role class for this one user."""

    class Bound(ExpertCallsRole):
        part = user

    return Bound
