"""Role `backbone`: a dialable peer that stays: way into the DHT for everybody else, and a witness for status.

The DHT and the host do the work; this role says what the peer is for and keeps an eye on who is there.
"""

from __future__ import annotations

from typing import ClassVar

import trio

from peerd.role import RoleContext


class BackboneRole:
    """Serves nothing of its own: being reachable is the service."""

    name: ClassVar[str] = "backbone"
    needs_run: ClassVar[bool] = False

    def __init__(self, ctx: RoleContext) -> None:
        self._ctx = ctx

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def leave(self) -> None:
        """Nothing to hand in."""

    def status(self) -> dict[str, object]:
        peers = len(self._ctx.host.connected())
        return {"connected": peers, "waits_for": None if peers else "peers: nobody has connected yet"}
