"""Trace of a simulation: one line per event, and one hash over all events.

The same seed gives the same lines and the same hash, which proves that a run is reproducible. Keeps the newest events,
and counts of all kinds; the hash covers every event since the start. Times are trio's, in nanosecond resolution.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

import trio

KEPT_EVENTS: Final = 2_000  # enough to find the cause of a failure


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event of this `kind` at `node`, at time `time_s`."""

    time_s: float
    node: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.time_s:.9f} {self.node} {self.kind} {self.detail}"


class Trace:
    """Records the events of one simulation run."""

    def __init__(self, keep: int = KEPT_EVENTS) -> None:
        self.counts: Counter[str] = Counter()  # events by kind
        self._newest: deque[TraceEvent] = deque(maxlen=keep)
        self._sum = hashlib.blake2b(digest_size=16)

    def add(self, node: str, kind: str, detail: str = "") -> None:
        """Record an event that happens now."""
        event = TraceEvent(trio.current_time(), node, kind, detail)
        self.counts[kind] += 1
        self._newest.append(event)
        self._sum.update(f"{event}\n".encode())

    def hash(self) -> str:
        """Hash of all events so far, 32 hex digits."""
        return self._sum.hexdigest()

    def newest(self, count: int = KEPT_EVENTS) -> list[TraceEvent]:
        """The last `count` events that are still kept, oldest first."""
        return list(self._newest)[-count:] if count > 0 else []
