"""Rate limiter of one direction of this machine's internet connection, or of a relay: a token bucket with two fair
queues. It decides how many bytes may pass now, and whose turn it is.

A flow (one connection in one direction) asks for the bytes that it could move at once and is granted at most a quantum.
Flows of members of the run (`Rank.FIRST`) get fifteen sixteenths of the rate while they need it, all others the rest.
The others also leave half of the bucket unused, so that a member that sends after a pause finds tokens there. Within a
rank, turns follow start-time fair queueing (Goyal et al. 1996): a grant starts where the account's last one ended in
virtual time, or at the rank's virtual time if that is later, and the earliest start is served first. So accounts that
always want more get equal bytes, up to a quantum or two. A member's connection has its own account; strangers at one
place share one, however many connections and identities they have. A small message of an account that has used no more
than its share goes before all these, so that a call overtakes other connections' bulk data. If such messages take more
than half of the rate, the others get their turn, and a new account starts behind those that wait, so nobody starves.

Invariants: the bytes granted and charged in any time t are at most rate x t + burst, to within a byte; bytes charged
without a request, such as headers, are deducted from later grants. While a flow waits no tokens are lost, as long as
`wake` is called within SLACK_S of `wake_at` (half of that if only strangers wait). Flows and accounts belong to
connections: only the queue grows with the number of strangers, by one entry per connection.
"""

from __future__ import annotations

import heapq
import math
from enum import IntEnum
from typing import Final

QUANTUM_S: Final = 0.004  # time of the line in one grant: each grant costs a timer and a system call
QUANTUM_BYTES_LEAST: Final = 3 * 1024  # two packets
QUANTUM_BYTES_MOST: Final = 256 * 1024
SLACK_S: Final = 0.05  # delay of `wake` on a busy event loop that costs no tokens
BURST_BYTES_LEAST: Final = 16 * 1024
SMALL_BYTES: Final = 2048  # a call or an answer of one or two packets
_AHEAD_QUANTA: Final = 4  # quanta of small messages in a row before bulk data gets one
_ROUNDING_BYTES: Final = 1.0  # tolerance, so that a call at `wake_at` finds enough tokens
_DEBT_S: Final = 1.0  # greatest debt, so that a wrong figure of the system cannot block us


class Rank(IntEnum):
    """Priority of a flow."""

    FIRST = 0  # a member's, or this machine's own
    REST = 1


_WEIGHTS: Final = {Rank.FIRST: 15.0, Rank.REST: 1.0}


class Account:
    """Fair-queue account of one owner, shared by its flows. Created by the owner, changed only by the Limiter."""

    __slots__ = ("__weakref__", "finish")

    def __init__(self) -> None:
        self.finish = -1.0  # virtual time up to which it has been served; negative for a new account


class Flow:
    """One connection's entry in the queue. The owner may set `account` and `rank` between two requests."""

    __slots__ = ("account", "asked", "rank", "waits")

    def __init__(self, account: Account | None = None, rank: Rank = Rank.FIRST) -> None:
        self.account, self.rank = account or Account(), rank
        self.waits = 0  # number of its entry in the queue; 0: none
        self.asked = 0  # bytes of that entry


class Limiter:
    """Limits one direction of an internet connection, or a relay's traffic. Times in seconds, amounts in bytes."""

    def __init__(self, bytes_per_s: float) -> None:
        if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
            raise ValueError("a limit must be a finite number of bytes/s above 0")
        self.bytes_per_s = bytes_per_s
        self.quantum_bytes = int(min(max(bytes_per_s * QUANTUM_S, QUANTUM_BYTES_LEAST), QUANTUM_BYTES_MOST))
        self.burst_bytes = max(bytes_per_s * SLACK_S, BURST_BYTES_LEAST, self.quantum_bytes)
        self._tokens = self.burst_bytes
        self._at = -math.inf
        self._virtual = 0.0  # virtual time among the two ranks
        self._bands = {rank: _Band(weight, self.quantum_bytes) for rank, weight in _WEIGHTS.items()}
        self._left = {Rank.FIRST: 0.0, Rank.REST: min(self.burst_bytes / 2, self.burst_bytes - self.quantum_bytes)}
        self._numbers = 0

    def ask(self, now: float, flow: Flow, wanted: int) -> int:
        """Number of bytes that `flow` may move now, at most one quantum; 0 if it must wait for a grant from `wake`."""
        wanted = min(max(wanted, 1), self.quantum_bytes)
        if self.try_ask(now, flow, wanted):
            return wanted
        self._numbers += 1
        flow.waits, flow.asked = self._numbers, wanted
        self._bands[flow.rank].push(flow)
        return 0

    def try_ask(self, now: float, flow: Flow, wanted: int) -> bool:
        """Grant all of `wanted` and return True if no flow waits and there are enough tokens; else change nothing."""
        if wanted > self.quantum_bytes or self.waiting:
            return False
        self._fill(now)
        if self._tokens < wanted + self._left[flow.rank]:
            return False
        band = self._bands[flow.rank]
        band.served(band.charge(flow.account, wanted))
        self._grant(band, wanted)
        return True

    def wake(self, now: float) -> list[tuple[Flow, int]]:
        """The waiting flows that may move now, with the number of bytes of each."""
        granted: list[tuple[Flow, int]] = []
        self._fill(now)
        while (rank := self._next()) is not None:
            band = self._bands[rank]
            wanted = band.head().asked
            if self._tokens + _ROUNDING_BYTES < wanted + self._left[rank]:
                break
            granted.append((band.pop(), wanted))
            self._grant(band, wanted)
        return granted

    def wake_at(self) -> float:
        """Time at which the first waiting flow gets its turn, or infinity if none waits."""
        rank = self._next()
        if rank is None:
            return math.inf
        needed = self._bands[rank].head().asked + self._left[rank]
        return self._at + max(0.0, needed - self._tokens) / self.bytes_per_s

    def leave(self, flow: Flow) -> None:
        """Remove `flow` from the queue."""
        if flow.waits:
            flow.account.finish -= flow.asked
            flow.waits = 0

    def give_back(self, flow: Flow, count: int) -> None:
        """Return `count` bytes of a grant that were not needed."""
        self._tokens = min(self._tokens + count, self.burst_bytes)
        flow.account.finish -= count
        band = self._bands[flow.rank]
        band.finish -= count / band.weight

    def charge(self, count: int) -> None:
        """Charge bytes that passed without a request (headers, acknowledgements, repeats); others wait longer."""
        self._tokens = max(self._tokens - count, -_DEBT_S * self.bytes_per_s)

    @property
    def waiting(self) -> bool:
        """True if any flow waits."""
        return any(band.waiting for band in self._bands.values())

    def check(self) -> None:
        """Assert the invariants, for tests."""
        assert self._tokens <= self.burst_bytes
        for band in self._bands.values():
            band.check()

    def _next(self) -> Rank | None:
        """The rank whose first entry has the next turn, or None if none waits."""
        waiting = (rank for rank, band in self._bands.items() if band.waiting)
        return min(waiting, key=lambda rank: max(self._virtual, self._bands[rank].finish), default=None)

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self._tokens + (now - self._at) * self.bytes_per_s, self.burst_bytes)
            self._at = now

    def _grant(self, band: _Band, count: int) -> None:
        self._virtual = max(self._virtual, band.finish)
        band.finish = self._virtual + count / band.weight
        self._tokens -= count


class _Band:
    """The waiting flows of one rank: fair among accounts, small messages first."""

    def __init__(self, weight: float, quantum_bytes: int) -> None:
        self.weight, self.finish = weight, 0.0  # virtual time up to which the rank has been served
        self._quantum_bytes = quantum_bytes
        self._virtual = 0.0
        self._small: _Queue = []
        self._bulk: _Queue = []
        self._ahead_bytes = 0  # bytes by which small messages are ahead of bulk data

    @property
    def waiting(self) -> bool:
        return bool(_tidy(self._small) or _tidy(self._bulk))

    def push(self, flow: Flow) -> None:
        account = flow.account
        small = flow.asked <= SMALL_BYTES and account.finish <= self._virtual
        if not small and account.finish < 0:
            account.finish = self._virtual + self._quantum_bytes
        start = self.charge(account, flow.asked)
        heapq.heappush(self._small if small else self._bulk, (start, flow.asked, flow.waits, flow))

    def charge(self, account: Account, count: int) -> float:
        """Charge `count` to the account; returns the virtual time at which it starts."""
        start = max(self._virtual, account.finish)
        account.finish = start + count
        return start

    def served(self, start: float) -> None:
        """Advance the virtual time to the start of a served entry."""
        self._virtual = max(self._virtual, start)

    def head(self) -> Flow:
        """The flow with the next turn; at least one must wait."""
        return self._first()[0][3]

    def pop(self) -> Flow:
        queue = self._first()
        start, wanted, _, flow = heapq.heappop(queue)
        flow.waits = 0
        if queue is self._bulk:
            self._ahead_bytes = max(self._ahead_bytes - wanted, 0)
        elif _tidy(self._bulk):
            self._ahead_bytes += wanted
        self.served(start)
        return flow

    def check(self) -> None:
        assert all(0 < entry[1] <= self._quantum_bytes for entry in (*self._small, *self._bulk))
        assert self._ahead_bytes <= _AHEAD_QUANTA * self._quantum_bytes

    def _first(self) -> _Queue:
        small, bulk = _tidy(self._small), _tidy(self._bulk)
        if small and (not bulk or self._ahead_bytes + small[0][1] <= _AHEAD_QUANTA * self._quantum_bytes):
            return small
        return bulk


_Queue = list[tuple[float, int, int, Flow]]  # (start, wanted, number, flow); a heap


def _tidy(queue: _Queue) -> _Queue:
    """The queue, after removing entries of departed flows from its head."""
    while queue and queue[0][3].waits != queue[0][2]:
        heapq.heappop(queue)
    return queue
