"""Rate limiter of a line, a token bucket with two fair queues: how many bytes may pass now, and whose turn it is.

A flow (one connection in one direction) asks for what it could move at once and is granted a quantum or less. Flows of
members of the run (`Rank.FIRST`) have fifteen sixteenths of the line as long as they want it, all others what is left.
These also leave half of the bucket, so that a member which wants something after a pause finds it there: a stranger
takes what nobody misses. Within a rank turns go by start-time fair queuing (Goyal et al. 1996): a grant starts where
the account's last one ended in virtual time, or at the rank's time when that is ahead, and the least start goes first:
accounts that always want more get equal bytes, up to a quantum or two. A member's connection has an account of its own;
strangers at one place share one, however many connections and identities they have. A small message of an account
that took no more than its part goes before all that, so that a call overtakes the bulk of other connections; when such
messages take more than half of the line the others have their turn, and a new account begins behind those that wait,
so nobody starves.

Invariants: what was granted and charged in any time t is at most rate x t + burst, give or take a byte; what is charged
unasked, such as headers, is paid back from what comes after. While somebody waits no allowance is lost, as long as
`wake` is called within SLACK_S of `wake_at` (half of that, where only strangers wait). Flows and accounts belong to
connections: nothing here grows with the number of strangers but the queue, one entry for each connection.
"""

from __future__ import annotations

import heapq
import math
from enum import IntEnum
from typing import Final

QUANTUM_S: Final = 0.004  # of the line in one grant: timers and calls of the system are paid once for each
QUANTUM_BYTES_LEAST: Final = 3 * 1024  # two packets
QUANTUM_BYTES_MOST: Final = 256 * 1024
SLACK_S: Final = 0.05  # a busy loop wakes us so late without a loss
BURST_BYTES_LEAST: Final = 16 * 1024
SMALL_BYTES: Final = 2048  # a call or an answer, of a packet or two
_AHEAD_QUANTA: Final = 4  # of small messages in a row, before bulk has one
_ROUNDING_BYTES: Final = 1.0  # a task that wakes at `wake_at` must find what it was promised
_DEBT_S: Final = 1.0  # more is forgiven: a figure of the system's that was wrong must not silence us


class Rank(IntEnum):
    """Priority of a flow."""

    FIRST = 0  # a member's, or this machine's own
    REST = 1


_WEIGHTS: Final = {Rank.FIRST: 15.0, Rank.REST: 1.0}


class Account:
    """Fair-queue account of one owner, shared by its flows. Made by the owner, changed by the Limiter alone."""

    __slots__ = ("__weakref__", "finish")

    def __init__(self) -> None:
        self.finish = -1.0  # virtual time up to which it has been served; below 0: it is new


class Flow:
    """One connection's place in the queue. `account` and `rank` are its owner's to set, between two requests."""

    __slots__ = ("account", "asked", "rank", "waits")

    def __init__(self, account: Account | None = None, rank: Rank = Rank.FIRST) -> None:
        self.account, self.rank = account or Account(), rank
        self.waits = 0  # the number of its entry in the queue; 0: none
        self.asked = 0  # bytes of that entry


class Limiter:
    """One direction of a line. Times are seconds, amounts bytes."""

    def __init__(self, bytes_per_s: float) -> None:
        if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
            raise ValueError("a limit must be a finite number of bytes/s above 0")
        self.bytes_per_s = bytes_per_s
        self.quantum_bytes = int(min(max(bytes_per_s * QUANTUM_S, QUANTUM_BYTES_LEAST), QUANTUM_BYTES_MOST))
        self.burst_bytes = max(bytes_per_s * SLACK_S, BURST_BYTES_LEAST, self.quantum_bytes)
        self._tokens = self.burst_bytes
        self._at = -math.inf
        self._virtual = 0.0  # of the two ranks among each other
        self._bands = {rank: _Band(weight, self.quantum_bytes) for rank, weight in _WEIGHTS.items()}
        self._left = {Rank.FIRST: 0.0, Rank.REST: min(self.burst_bytes / 2, self.burst_bytes - self.quantum_bytes)}
        self._numbers = 0

    def ask(self, now: float, flow: Flow, wanted: int) -> int:
        """Bytes that `flow` may move at once; 0: it waits, and `wake` will say. At most one quantum."""
        wanted = min(max(wanted, 1), self.quantum_bytes)
        if self.try_ask(now, flow, wanted):
            return wanted
        self._numbers += 1
        flow.waits, flow.asked = self._numbers, wanted
        self._bands[flow.rank].push(flow)
        return 0

    def try_ask(self, now: float, flow: Flow, wanted: int) -> bool:
        """Take all of `wanted` if that is possible at once, out of turn of nobody; else nothing changes."""
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
        """Flows that may move now, of those that wait, and how many bytes each."""
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
        """Time at which the first waiting flow has its turn; inf: none waits."""
        rank = self._next()
        if rank is None:
            return math.inf
        needed = self._bands[rank].head().asked + self._left[rank]
        return self._at + max(0.0, needed - self._tokens) / self.bytes_per_s

    def leave(self, flow: Flow) -> None:
        """`flow` waits no longer."""
        if flow.waits:
            flow.account.finish -= flow.asked
            flow.waits = 0

    def give_back(self, flow: Flow, count: int) -> None:
        """So much of a grant was not needed."""
        self._tokens = min(self._tokens + count, self.burst_bytes)
        flow.account.finish -= count
        band = self._bands[flow.rank]
        band.finish -= count / band.weight

    def charge(self, count: int) -> None:
        """So much has passed that nobody asked for: headers, acknowledgements, repeats. Others wait the longer."""
        self._tokens = max(self._tokens - count, -_DEBT_S * self.bytes_per_s)

    @property
    def waiting(self) -> bool:
        """True when any flow waits."""
        return any(band.waiting for band in self._bands.values())

    def check(self) -> None:
        """Invariants, for tests."""
        assert self._tokens <= self.burst_bytes
        for band in self._bands.values():
            band.check()

    def _next(self) -> Rank | None:
        """The rank whose first entry has its turn; None: none waits."""
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
    """The flows of one rank that wait: fair among accounts, small messages first."""

    def __init__(self, weight: float, quantum_bytes: int) -> None:
        self.weight, self.finish = weight, 0.0  # up to which the rank has been served, among the ranks
        self._quantum_bytes = quantum_bytes
        self._virtual = 0.0
        self._small: _Queue = []
        self._bulk: _Queue = []
        self._ahead_bytes = 0  # what the former took before the latter, beyond one half

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
        """Put `count` on the account; returns where it starts."""
        start = max(self._virtual, account.finish)
        account.finish = start + count
        return start

    def served(self, start: float) -> None:
        """Something that began there has passed."""
        self._virtual = max(self._virtual, start)

    def head(self) -> Flow:
        """The flow whose turn it is; one must wait."""
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
    """The queue without the entries of departed flows at its head."""
    while queue and queue[0][3].waits != queue[0][2]:
        heapq.heappop(queue)
    return queue
