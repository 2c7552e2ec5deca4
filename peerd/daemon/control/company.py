"""Makes sure that a peer has reached other peers and has a view of its run, so that it never trains alone unnoticed.

A peer with bootstrap addresses takes no part in its run until it has company, unless `alone` is set, and then until it
has a view of the run (`swarm/run_view`). Company is a peer at one of these addresses that answers, or any
connected peer of the same run: one that connected to us, or was found in the local network. Peers of a run recognize
each other by the settings that each publishes in the directory, even while it waits. Failed attempts are reported, at
growing intervals. If a peer loses its last link, it reports that, and continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

from peerd.core.errors import RemoteError, Unreachable
from peerd.dht.dht import Dht
from peerd.role.run_services import RunServices
from peerd.wire.host.host import Host

_FIRST_WORD_S: Final = 5.0  # until an address that does not answer is reported
_AGAIN_S: Final = 60.0  # between two reports; doubles each time, up to _RARELY_S
_RARELY_S: Final = 900.0
_FELLOWS_S: Final = 2.0  # between two searches for peers of the run among the connected peers
_LOOK_S: Final = 1.0  # between two checks of our links
_LOST_S: Final = 5.0  # without any link, until that is reported
_TOLD: Final = 3  # most addresses in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanyConfig:
    """The user's settings. `advice` is how to start without other peers; waiting raises an error after `patience_s`."""

    alone: bool = False
    advice: str = "give --alone to begin without"
    patience_s: float = math.inf


class Company:
    """Waits for other peers and for a view of the run. Calls `tell(event, reason)` to inform the user."""

    def __init__(
        self, net: tuple[Host, Dht], services: RunServices | None, wish: CompanyConfig, tell: Callable[[str, str], None]
    ) -> None:
        self._host, self._dht = net
        self._services, self._wish, self._tell = services, wish, tell
        if services is not None:
            services.view.alone, services.view.advice = wish.alone, wish.advice
        self._found = trio.Event()
        self._lost_at: float | None = None  # when the last link was lost
        self._said = False

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look for other peers, and report the result, until cancelled. The directory must be running."""
        if self._wish.alone or self._dht.entries.reached.is_set():
            self._found.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._seek)
            nursery.start_soon(self._watch_links)
            task_status.started()

    async def wait(self) -> None:
        """Wait for another peer and a view of the run. Raises Unreachable after `patience_s`, with what is missing."""
        began = trio.current_time()
        with trio.move_on_after(self._wish.patience_s):
            await self._found.wait()
        if not self._found.is_set():
            raise Unreachable(f"{self._tried()}; waited for {self._wish.patience_s:g} s")
        if self._services is not None:
            await self._services.view.settled(max(0.0, began + self._wish.patience_s - trio.current_time()))

    def waits_for(self) -> str | None:
        """The bootstrap addresses that failed, or what the view of the run lacks. None once nothing is missing."""
        if not self._found.is_set():
            return f"{self._tried()}; retrying; {self._wish.advice}"
        return self._services.view.waits_for() if self._services is not None else None

    def alone(self) -> str | None:
        """Message on how long no peer has been connected. None while one is, or before the first connection."""
        if self._lost_at is None or (gone_s := trio.current_time() - self._lost_at) < _LOST_S:
            return None
        told = f"{gone_s:.0f} s" if gone_s < 100 else f"{gone_s / 60:.0f} min"
        return f"alone for {told}: no other peer can be reached"

    def _tried(self) -> str:
        tried = [f"{addr}: {why}" for addr, why in self._dht.entries.tried()]
        if len(tried) == 1:
            return f"reached no peer at the bootstrap address {tried[0]}"
        more = [f"and {len(tried) - _TOLD} more"] if len(tried) > _TOLD else []
        return f"reached none of the {len(tried)} bootstrap addresses: {'; '.join(tried[:_TOLD] + more)}"

    # --- looking --------------------------------------------------------------------------------------------------

    async def _seek(self) -> None:
        """Look for another peer and a view of the run until both are found."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._complain)
            nursery.start_soon(self._look_for_fellows)
            nursery.start_soon(self._await_entry)
            await self._found.wait()
            if self._services is not None:
                await self._services.view.settled()
            nursery.cancel_scope.cancel()
        if self._said and not self._wish.alone:
            self._tell("company.found", "reached another peer")

    async def _await_entry(self) -> None:
        await self._dht.entries.reached.wait()
        self._found.set()

    async def _look_for_fellows(self) -> None:
        """Look for connected peers of our run that are not at our bootstrap addresses."""
        while True:
            await trio.sleep(_FELLOWS_S)
            if self._services is None or not self._host.connected() or self._found.is_set():
                continue
            with suppress(RemoteError):
                await self._services.settings.publish()
                if await self._services.directory.fellows():
                    self._found.set()

    async def _complain(self) -> None:
        """Report what was tried, first when every address has failed or not answered, then at growing intervals."""
        with trio.move_on_after(_FIRST_WORD_S):
            await self._dht.entries.failed.wait()
            if self._found.is_set():
                await trio.sleep_forever()
        pause_s = _AGAIN_S
        while (reason := self.waits_for()) is not None:
            self._said = True
            self._tell("company.missing", reason)
            with trio.move_on_after(pause_s):
                if self._found.is_set():
                    await trio.sleep_forever()
                await self._found.wait()
                await trio.sleep(_FIRST_WORD_S)  # then report what the view lacks, if anything
            pause_s = min(2 * pause_s, _RARELY_S)

    async def _watch_links(self) -> None:
        """Record when the last link is lost, and report it if none follows within _LOST_S."""
        had, said = False, False
        while True:
            await trio.sleep(_LOOK_S)
            if self._host.connected():
                had, self._lost_at = True, None
                if said:
                    self._tell("company.found", "reached another peer again")
                said = False
            elif had:
                self._lost_at = trio.current_time() if self._lost_at is None else self._lost_at
                if not said and self.alone() is not None:
                    said = True
                    self._tell("company.lost", "lost the links to all other peers; continuing alone")
