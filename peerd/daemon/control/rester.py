"""State of a volunteer's peer outside its hours: it has no network and no roles, and only answers `peerd status`.

The caller has locked the data directory, and has left the swarm.
"""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from peerd.core.ids import PeerId
from peerd.core.version import VERSION
from peerd.daemon.control import socket
from peerd.daemon.control.guest import limits_told
from peerd.daemon.control.open_hours import OpenHours
from peerd.log import EventLog, plain
from peerd.run.home import socket_path
from peerd.run.runfile import LimitsSection


@dataclass(frozen=True, slots=True, kw_only=True)
class Rester:
    """A peer that rests until its hours begin."""

    home: Path
    peer: PeerId
    run: str
    roles: Sequence[str]
    limits: LimitsSection
    hours: OpenHours
    log: EventLog

    async def rest(self, signals: AsyncIterable[int]) -> bool:
        """Wait until the hours begin. Returns False if a signal ended the wait."""
        until = self.hours.opens
        self.log.event("daemon.rests", until=until, why=f"limits.hours {self.hours.text}")
        ended = False

        async def obey() -> None:
            nonlocal ended
            async for _ in signals:
                ended = True
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(obey)
            if socket.SUPPORTED:
                await nursery.start(functools.partial(socket.serve, socket_path(self.home), self._snapshot))
            await self.hours.opened()
            nursery.cancel_scope.cancel()
        if not ended:
            self.log.event("daemon.resumes", why=f"limits.hours {self.hours.text}")
        return not ended

    async def _snapshot(self) -> dict[str, Any]:
        until = self.hours.opens
        waits = f"{until}, when its hours begin (limits.hours)"
        shown = {
            "version": VERSION,
            "pid": os.getpid(),
            "data_dir": str(self.home),
            "run": self.run or None,
            "peer": {"id": self.peer, "addrs": []},
            "roles": [{"role": role, "state": "resting", "restarts": 0, "waits_for": waits} for role in self.roles],
            "limits": limits_told(self.limits, until),
            "events": self.log.recent(),
        }
        return {key: plain(value) for key, value in shown.items()}
