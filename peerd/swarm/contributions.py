"""Contributions of this peer to a run in one role: counted, stored across restarts, published for the leaderboard.

`add` is cheap and may be called at every step; `run` publishes regularly. The figures are this peer's own claim
(`counted_record` has the conductor's count). Its name is in the token that the record contains. The totals are in a
small file in the role's directory; if it cannot be read or written, only the past totals are lost.
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from peerd.core.clock import Clock
from peerd.core.errors import RemoteError
from peerd.core.work import Worker
from peerd.dht.dht import Dht
from peerd.messages.contributions import Contributed, contributions_key
from peerd.messages.encoding import encode
from peerd.rpc.rpc_types import AccessGuard
from peerd.run.home import write_atomically

_log = logging.getLogger("peerd.contributions")

PERIOD_S: Final = 20.0
_TTL_S: Final = 300.0
_MOST: Final = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class ContributionOf:
    """Run and role of the totals. `worker` writes them to `file`; without it they count this process only."""

    run: str
    role: str
    file: Path | None = None
    worker: Worker | None = None


class ContributionTally:
    """The totals of one role of this peer."""

    def __init__(self, of: ContributionOf, dht: Dht, clock: Clock, gate: AccessGuard | None) -> None:
        self.samples = 0
        self.bytes_aggregated = 0
        self.seconds = 0.0
        self.since = int(clock.wall())
        self._run, self._role, self._file, self._worker = of.run, of.role, of.file, of.worker
        self._dht, self._clock, self._gate = dht, clock, gate
        self._counted_to = clock.now()
        self._problem = ""  # why the last write failed
        self._load()

    def add(self, *, samples: int = 0, bytes_aggregated: int = 0) -> None:
        """Add to the totals: samples of committed steps, and bytes summed for others."""
        self.samples = min(self.samples + samples, _MOST)
        self.bytes_aggregated = min(self.bytes_aggregated + bytes_aggregated, _MOST)

    async def run(self) -> None:
        """Publish every 20 s, until cancelled."""
        while True:
            await self.publish()
            await trio.sleep(PERIOD_S)

    async def publish(self) -> None:
        """Store the totals and publish them. A directory that fails is no error."""
        now = self._clock.now()
        self.seconds += now - self._counted_to
        self._counted_to = now
        await self._save()
        token = self._gate.token if self._gate is not None else b""
        told = Contributed(self.samples, self.bytes_aggregated, int(self.seconds), self.since, token)
        suffix = self._role.encode()[:64]
        try:
            await self._dht.put(contributions_key(self._run), encode(told), ttl_s=_TTL_S, suffix=suffix)
        except RemoteError as error:
            _log.info("contributions could not be published: %s", error)

    def _load(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            kept = json.loads(self._file.read_bytes())[self._run]
            samples, aggregated, seconds, since = (max(0, int(kept[key])) for key in ("samples", "bytes", "s", "since"))
            self.samples, self.bytes_aggregated = min(samples, _MOST), min(aggregated, _MOST)
            self.seconds, self.since = float(seconds), min(since, self.since)

    async def _save(self) -> None:
        """Write the file, on the worker: a disk may be slow."""
        file = self._file
        if file is None or self._worker is None:
            return
        kept = {"samples": self.samples, "bytes": self.bytes_aggregated, "s": int(self.seconds), "since": self.since}
        try:
            await self._worker.run(
                lambda: write_atomically(file, json.dumps({self._run: kept}).encode()), name="keep contributions"
            )
        except OSError as error:
            problem = f"{file} can't be written: {error.strerror or error}"
            if problem != self._problem:
                _log.info("contributions could not be saved: %s", problem)
            self._problem = problem
        else:
            self._problem = ""
