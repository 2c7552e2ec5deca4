"""Merge queue of a host's experts: requests of all callers for the same work of one expert become one batch.

Sans-IO. Each kind of work of each expert (its forward, its backward) has its own queue, called a line. The line whose
first request is due first is served next: as many of its requests as fit form a batch. As long as no caller uses more
than its share, the request that waits longest is due first. Requests are stamped by start-time fair queueing over all
lines (Goyal, Vin and Cheng, 1996), so a caller that floods waits behind its own requests; an occasional one does not.

Invariants: the requests of one caller in one line are served in order of arrival; a batch has at most `max_batch`
samples; no more requests than the bounds allow wait, per caller or in all; nothing is stored about a caller that has no
waiting request and is not ahead of the others.

A hostile caller may send any number of requests, of any number of samples, and withdraw them. What exceeds its bound is
rejected before it waits, and each accepted request counts against its share, withdrawn or not.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from peerd.core.errors import LocalError, Overloaded
from peerd.core.limits import EXPERT_QUEUED, EXPERT_QUEUED_PER_CALLER

L = TypeVar("L", bound=Hashable)  # the name of a line
T = TypeVar("T")

_LEAST_RETRY_S: Final = 0.05
_MOST_RETRY_S: Final = 30.0
_OUTDATED: Final = 64  # outdated heap entries that are tolerated
_SMOOTHING: Final = 0.2  # weight of the newest batch in the measured pace


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBounds:
    """Bounds of a merge queue: samples of one batch, and waiting requests."""

    max_batch: int
    per_caller: int = EXPERT_QUEUED_PER_CALLER
    in_all: int = EXPERT_QUEUED


@dataclass(slots=True, eq=False)
class Queued(Generic[L, T]):
    """A waiting request. `cost` is in units of one sample's forward."""

    line: L
    caller: str
    samples: int
    cost: float
    request: T
    since: float = 0.0
    due: tuple[float, int] = (0.0, 0)  # stamp, and number in order of arrival
    waits: bool = False


@dataclass(slots=True)
class MergeQueue(Generic[L, T]):
    """The waiting requests of one host, in lines: one for each kind of work of each expert."""

    bounds: QueueBounds
    _lines: dict[L, list[Queued[L, T]]] = field(default_factory=dict)  # each in order of `due`
    _heads: list[tuple[tuple[float, int], L]] = field(default_factory=list)  # heap; entries may be outdated
    _ahead: dict[str, float] = field(default_factory=dict)  # by caller: the stamp of its next request
    _waiting: Counter[str] = field(default_factory=Counter)  # requests by caller
    _held: set[L] = field(default_factory=set)  # lines that are not served for now
    _progress: float = 0.0  # the stamp of the last request served
    _numbers: int = 0
    _cost: float = 0.0  # of all waiting requests
    _s_per_cost: float = 0.0  # measured; 0: nothing yet

    def __len__(self) -> int:
        """Number of waiting requests."""
        return self._waiting.total()

    def objection(self, caller: str, samples: int = 1) -> Overloaded | None:
        """Error by which a request of `caller` would be rejected now, or None if it would be accepted."""
        if samples > self.bounds.max_batch:
            raise LocalError(f"a request of {samples} samples; a batch has {self.bounds.max_batch} at most")
        mine, most = self._waiting[caller], self.bounds.per_caller
        if mine >= most:
            return Overloaded(f"{mine} of your requests are waiting; allowed: {most}", self.retry_after_s())
        if len(self) >= self.bounds.in_all:
            return Overloaded(f"{len(self)} requests are waiting; allowed: {self.bounds.in_all}", self.retry_after_s())
        return None

    def put(self, now: float, queued: Queued[L, T]) -> Overloaded | None:
        """Add a request to the line for its expert and kind of work. Returns the error if it is rejected, else None."""
        objection = self.objection(queued.caller, queued.samples)
        if objection is not None:
            return objection
        self._numbers += 1
        stamp = max(self._progress, self._ahead.get(queued.caller, 0.0))
        self._ahead[queued.caller] = stamp + queued.cost
        queued.since, queued.due, queued.waits = now, (stamp, self._numbers), True
        line = self._lines.setdefault(queued.line, [])
        bisect.insort(line, queued, key=lambda one: one.due)
        if line[0] is queued:
            self._come_to(queued.line)
        self._waiting[queued.caller] += 1
        self._cost += queued.cost
        return None

    def take(self) -> Sequence[Queued[L, T]]:
        """The next batch, its requests in the order in which they were due; empty if nothing waits.

        The first request always fits; later ones are added if they fit. None overtakes another of its caller.
        """
        while self._heads:
            due, name = heapq.heappop(self._heads)
            line = self._lines.get(name)
            if line and line[0].due == due and name not in self._held:
                self._progress = max(self._progress, due[0])
                return self._merge(name, line)
        return ()

    def _merge(self, name: L, line: list[Queued[L, T]]) -> list[Queued[L, T]]:
        batch, left, room, barred = list[Queued[L, T]](), list[Queued[L, T]](), self.bounds.max_batch, set[str]()
        for queued in line:
            if queued.samples <= room and queued.caller not in barred:
                batch.append(queued)
                room -= queued.samples
            else:
                left.append(queued)
                barred.add(queued.caller)
        self._keep(name, left)
        for queued in batch:
            self._gone(queued)
        return batch

    def withdraw(self, queued: Queued[L, T]) -> bool:
        """Remove a request; False if it is in a batch already."""
        if not queued.waits:
            return False
        line = self._lines[queued.line]
        line.remove(queued)
        self._keep(queued.line, line)
        self._gone(queued)
        return True

    def hold(self, name: L) -> None:
        """Stop serving one line of requests until `release`; it still accepts requests."""
        self._held.add(name)

    def release(self, name: L) -> None:
        """Serve a line of requests again after `hold`."""
        self._held.discard(name)
        if name in self._lines:
            self._come_to(name)

    def clear(self, name: L) -> list[Queued[L, T]]:
        """Remove and return all requests to one expert for one kind of work, because it is no longer served here."""
        self._held.discard(name)
        line = self._lines.pop(name, [])
        for queued in line:
            self._gone(queued)
        return line

    def served(self, cost: float, seconds: float) -> None:
        """Record the duration of a batch, for later estimates."""
        if cost > 0:
            pace, old = seconds / cost, self._s_per_cost
            self._s_per_cost = old + _SMOOTHING * (pace - old) if old else pace

    def wait_s(self) -> float:
        """Estimated seconds that all waiting requests will take, or 0 while the pace is unknown."""
        return self._cost * self._s_per_cost

    def retry_after_s(self) -> float:
        """Estimated seconds until half of the waiting requests are served."""
        return min(_MOST_RETRY_S, max(_LEAST_RETRY_S, self.wait_s() / 2))

    def _keep(self, name: L, left: list[Queued[L, T]]) -> None:
        if left:
            self._lines[name] = left
            self._come_to(name)
        else:
            self._lines.pop(name, None)

    def _come_to(self, name: L) -> None:
        """Add the line's due time to the heap. `take` skips outdated entries; too many of them are removed here."""
        heapq.heappush(self._heads, (self._lines[name][0].due, name))
        if len(self._heads) > 4 * len(self._lines) + _OUTDATED:
            self._heads = [(line[0].due, other) for other, line in self._lines.items()]
            heapq.heapify(self._heads)

    def _gone(self, queued: Queued[L, T]) -> None:
        queued.waits = False
        self._waiting[queued.caller] -= 1
        self._cost -= queued.cost
        if not self._waiting[queued.caller]:
            del self._waiting[queued.caller]
        if not self._waiting:  # then nobody is ahead of anyone
            self._cost = 0.0
            self._ahead.clear()
            self._heads.clear()
        elif len(self._ahead) > 2 * len(self._waiting) + 16:
            self._ahead = {c: s for c, s in self._ahead.items() if s > self._progress or c in self._waiting}

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        waiting = [queued for line in self._lines.values() for queued in line]
        assert all(self._lines.values()), "an empty line is kept"
        assert all(queued.waits for queued in waiting)
        assert Counter(queued.caller for queued in waiting) == self._waiting
        assert len(waiting) <= self.bounds.in_all
        assert all(count <= self.bounds.per_caller for count in self._waiting.values())
        assert abs(sum(queued.cost for queued in waiting) - self._cost) < 1e-6 * max(1.0, self._cost)
        for name, line in self._lines.items():
            assert [queued.due for queued in line] == sorted(queued.due for queued in line)
            if name not in self._held:
                assert (line[0].due, name) in self._heads, "a line that is never served"
        assert len(self._heads) <= 4 * len(self._lines) + _OUTDATED
