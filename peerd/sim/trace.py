"""Trace of a simulation: one line per event and one hash over all of them.

Same seed, same lines, same hash: that is how a run proves that it can be repeated. Keeps the newest events and counts
of all; the hash covers every event since the start. Times are trio's, to the nanosecond.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

import trio

KEPT_EVENTS: Final = 2_000  # enough to read what led to a failure


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """At `time_s`, `node` saw `kind`."""

    time_s: float
    node: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.time_s:.9f} {self.node} {self.kind} {self.detail}"


class Trace:
    """The record of one run."""

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
        """32 hex digits over all events so far."""
        return self._sum.hexdigest()

    def newest(self, count: int = KEPT_EVENTS) -> list[TraceEvent]:
        """The last `count` events that are still kept, oldest first."""
        return list(self._newest)[-count:] if count > 0 else []
