"""Announces a stage peer in the directory: at once, again before the record expires, and after steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from peerd.core.errors import RemoteError
from peerd.core.signals import Signal
from peerd.messages.progress import StageProgress, pause_s
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices

_ANNOUNCE_S: Final = 5.0
_ANNOUNCE_RARELY_S: Final = 20.0  # a third of a record's life


async def announce_now_and_then(
    ctx: RoleContext, services: RunServices, progress: Callable[[], StageProgress], stepped: Signal, told: trio.Event
) -> None:
    """Announce until cancelled. `stepped` is notified at each step. Sets `told` once the directory has the record."""
    while True:
        try:
            await services.directory.announce(progress())
            told.set()
            await services.settings.publish()
        except RemoteError as error:
            ctx.log.event("dht.announce_failed", level="warning", reason=str(error))
        with trio.move_on_after(pause_s(services.following.step_in_s, _ANNOUNCE_S, _ANNOUNCE_RARELY_S)):
            await services.directory.moved_or(stepped)
            await trio.sleep(1.0)  # at most one record a second, even if steps are shorter
