"""The books of calls, sans-IO: what a method may cost, how loaded it is, which calls wait.

Nothing here reads a clock or a stream: `now` and `peer` are arguments. Everything is bounded by core/limits.
A hostile peer may: call too often, answer calls that were never made. What it has us hold is in `machine/budget/book`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from peerd.core.errors import LocalError, ProtocolViolation
from peerd.core.ids import PeerId
from peerd.core.limits import (
    RPC_CALLS,
    RPC_CALLS_PER_PEER,
    RPC_DEADLINE_S,
    RPC_DEFAULT_BODY_BYTES,
    RPC_NAME_BYTES,
    RPC_PENDING,
)

_METHOD = re.compile(r"([a-z][a-z0-9_-]{0,31})/([1-9][0-9]{0,3})/([a-z][a-z0-9_-]*)")
E = TypeVar("E")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodLimits:
    """Limits of one method on its callers; more is refused, or answered with Overloaded."""

    body_bytes: int = RPC_DEFAULT_BODY_BYTES  # of a request or part
    frames: int = 0  # of a request or part
    frame_bytes: int = 0  # payloads of these frames together
    rows: int | None = None  # samples of each frame: its first dimension; None: any number
    calls_per_peer: int = RPC_CALLS_PER_PEER  # at once
    calls: int = RPC_CALLS  # at once, all peers together
    deadline_s: float = RPC_DEADLINE_S  # callers that would wait longer are cut to this

    def objection(self, body_bytes: int, frames: int, frame_bytes: int, rows: int = 0) -> str | None:
        """Reason to refuse such a message, or None if it is allowed. `rows`: the most that one of its frames has."""
        if body_bytes > self.body_bytes:
            return f"a body of {body_bytes} bytes; allowed: {self.body_bytes}"
        if frames > self.frames:
            return f"a message of {frames} frames; allowed: {self.frames}"
        if self.rows is not None and rows > self.rows:
            return f"a frame of {rows} samples; allowed: {self.rows} samples"
        if frame_bytes > self.frame_bytes:
            return f"frames of {frame_bytes} bytes; allowed: {self.frame_bytes}"
        return None


class MethodName(NamedTuple):
    """`dht/3/find`, taken apart: protocol `/peerd/dht/3`, name `find`, as text and as it travels."""

    full: str
    service: str
    protocol: str
    name: bytes


def method_name(full: str) -> MethodName:
    """Take "service/version/name" apart; LocalError when it has another form."""
    match = _METHOD.fullmatch(full)
    if match is None or len(match[3]) > RPC_NAME_BYTES:
        raise LocalError(f"{full!r} is not a method: service/version/name")
    service = f"{match[1]}/{match[2]}"
    return MethodName(full, service, f"/peerd/{service}", match[3].encode())


@dataclass(slots=True)
class Counters:
    """Counters of the calls of one method or service, on one side."""

    calls: int = 0
    failed: int = 0  # ended with an error, whoever's fault
    refused: int = 0  # of these, turned away before any work
    busy_s: float = 0.0  # time that the finished calls took, together


@dataclass(slots=True)
class MethodLoad:
    """Load of a method: the calls that run now, and what the finished ones cost."""

    limits: MethodLimits
    counters: Counters = field(default_factory=Counters)
    running: int = 0
    by_peer: dict[PeerId, int] = field(default_factory=dict)

    def enter(self, peer: PeerId) -> str | None:
        """Count one more call of `peer`; or say why it cannot run now."""
        mine = self.by_peer.get(peer, 0)
        if mine >= self.limits.calls_per_peer:
            return f"{mine} calls of yours are running"
        if self.running >= self.limits.calls:
            return f"{self.running} calls are running"
        self.running += 1
        self.by_peer[peer] = mine + 1
        self.counters.calls += 1
        return None

    def leave(self, peer: PeerId, took_s: float) -> None:
        """A call that entered has ended."""
        self.running -= 1
        self.counters.busy_s += took_s
        mine = self.by_peer[peer] - 1
        if mine:
            self.by_peer[peer] = mine
        else:
            del self.by_peer[peer]

    def retry_after_s(self) -> float:
        """Seconds after which a retry is worthwhile: about the time that one call takes."""
        finished = self.counters.calls - self.running
        mean_s = self.counters.busy_s / finished if finished else 0.1
        return min(max(mean_s, 0.02), 5.0)


class PendingCalls(Generic[E]):
    """The calls that wait for an answer on one stream: ids rise, each entry has a deadline.

    `due` is never later than the earliest deadline; it may be earlier, after calls were answered. So a driver that
    wakes at `due` and asks `overdue` misses nothing, and a call that is answered in time costs no timer.
    """

    def __init__(self, most: int = RPC_PENDING) -> None:
        self.due = math.inf
        self._most = most
        self._next_id = 1
        self._entries: dict[int, tuple[float, E]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, deadline: float, entry: E) -> int | None:
        """The new call's id; None when too many wait already."""
        if len(self._entries) >= self._most:
            return None
        call_id = self._next_id
        self._next_id = call_id + 1
        self._entries[call_id] = (deadline, entry)
        if deadline < self.due:
            self.due = deadline
        return call_id

    def get(self, call_id: int) -> E | None:
        """Like `pop`, but the call goes on waiting."""
        found = self._entries.get(call_id)
        if found is not None:
            return found[1]
        self.pop(call_id)
        return None

    def pop(self, call_id: int) -> E | None:
        """The entry that an answer is for; None when nobody waits any more. ProtocolViolation: never called."""
        found = self._entries.pop(call_id, None)
        if found is not None:
            return found[1]
        if not 0 < call_id < self._next_id:
            raise ProtocolViolation(f"an answer to call {call_id}, which was never made")
        return None

    def overdue(self, now: float) -> list[tuple[int, E]]:
        """Take out the calls whose deadline has passed, and move `due` on."""
        late = [(call_id, entry) for call_id, (deadline, entry) in self._entries.items() if deadline <= now]
        for call_id, _ in late:
            del self._entries[call_id]
        self.due = min((deadline for deadline, _ in self._entries.values()), default=math.inf)
        return late

    def drain(self) -> list[E]:
        """Take out every call: the stream is gone."""
        entries = [entry for _, entry in self._entries.values()]
        self._entries.clear()
        self.due = math.inf
        return entries
