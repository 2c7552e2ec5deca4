"""How many bytes may pass a line of limited rate now, and whose turn it is: a token bucket with a fair queue.

A flow (one connection in one direction) asks for what it could move at once and is granted a quantum or less. Turns go
by start-time fair queuing (Goyal et al. 1996): a grant starts where the flow's last one ended in virtual time, or at
the line's time when that is ahead, and the least start goes first: flows that always want more get equal bytes, up to
a quantum or two. A small message of a flow that took no more than its part goes before all that, so that a call
overtakes the bulk of other connections; when such messages take more than half of the line the others have their
turn, and a new connection begins behind those that wait, so nobody starves.

Invariants: what was granted and charged in any time t is at most rate x t + burst, give or take a byte; what is charged
unasked, such as headers, is paid back from what comes after. While somebody waits no allowance is lost, as long as
`wake` is called within SLACK_S of `wake_at`. Flows belong to their connections: nothing here grows with the number of
strangers but the queue, one entry for each connection.
"""

from __future__ import annotations

import heapq
import math
from typing import Final

QUANTUM_S: Final = 0.004  # of the line in one grant: timers and calls of the system are paid once for each
QUANTUM_BYTES_LEAST: Final = 3 * 1024  # two packets
QUANTUM_BYTES_MOST: Final = 256 * 1024
SLACK_S: Final = 0.05  # a busy loop wakes us so late without a loss
BURST_BYTES_LEAST: Final = 16 * 1024
SMALL_BYTES: Final = 2048  # a call or an answer, of a packet or two
_AHEAD_QUANTA: Final = 4  # of small messages in a row, before bulk has one
_ROUNDING_BYTES: Final = 1.0  # who wakes at `wake_at` must find what it was promised
_DEBT_S: Final = 1.0  # more is forgiven: a figure of the system's that was wrong must not silence us


class Flow:
    """One connection's place in the queue. Made by its owner, changed by the Limiter alone."""

    __slots__ = ("finish", "waits")

    def __init__(self) -> None:
        self.finish = -1.0  # virtual time up to which it has been served; below 0: it is new
        self.waits = 0  # the number of its entry in the queue; 0: none


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
        self._virtual = 0.0
        self._small: _Queue = []
        self._bulk: _Queue = []
        self._ahead_bytes = 0  # what the former took before the latter, beyond one half
        self._numbers = 0

    def ask(self, now: float, flow: Flow, wanted: int) -> int:
        """Bytes that `flow` may move at once; 0: it waits, and `wake` will say. At most one quantum."""
        wanted = min(max(wanted, 1), self.quantum_bytes)
        if self.try_ask(now, flow, wanted):
            return wanted
        self._numbers += 1
        flow.waits = self._numbers
        small = wanted <= SMALL_BYTES and flow.finish <= self._virtual
        if not small and flow.finish < 0:
            flow.finish = self._virtual + self.quantum_bytes
        heapq.heappush(self._small if small else self._bulk, (self._start(flow), wanted, self._numbers, flow))
        return 0

    def try_ask(self, now: float, flow: Flow, wanted: int) -> bool:
        """Take all of `wanted` if that is possible at once, out of turn of nobody; else nothing changes."""
        if wanted > self.quantum_bytes or self.waiting:
            return False
        self._fill(now)
        if self._tokens < wanted:
            return False
        self._grant(flow, self._start(flow), wanted)
        return True

    def wake(self, now: float) -> list[tuple[Flow, int]]:
        """Who may move how much now, of those who wait."""
        granted: list[tuple[Flow, int]] = []
        self._fill(now)
        while queue := self._next():
            start, wanted, _, flow = queue[0]
            if self._tokens + _ROUNDING_BYTES < wanted:
                break
            heapq.heappop(queue)
            flow.waits = 0
            if queue is self._bulk:
                self._ahead_bytes = max(self._ahead_bytes - wanted, 0)
            elif _tidy(self._bulk):
                self._ahead_bytes += wanted
            self._grant(flow, start, wanted)
            granted.append((flow, wanted))
        return granted

    def wake_at(self) -> float:
        """When the first who waits will have its turn; inf: nobody waits."""
        queue = self._next()
        if not queue:
            return math.inf
        return self._at + max(0.0, queue[0][1] - self._tokens) / self.bytes_per_s

    def leave(self, flow: Flow) -> None:
        """`flow` waits no longer."""
        flow.waits = 0

    def give_back(self, flow: Flow, count: int) -> None:
        """So much of a grant was not needed."""
        self._tokens = min(self._tokens + count, self.burst_bytes)
        flow.finish -= count

    def charge(self, count: int) -> None:
        """So much has passed that nobody asked for: headers, acknowledgements, repeats. Others wait the longer."""
        self._tokens = max(self._tokens - count, -_DEBT_S * self.bytes_per_s)

    @property
    def waiting(self) -> bool:
        """Whether anyone is in the queue."""
        return bool(_tidy(self._small) or _tidy(self._bulk))

    def check(self) -> None:
        """Invariants, for tests."""
        assert self._tokens <= self.burst_bytes
        assert all(0 < entry[1] <= self.quantum_bytes for entry in (*self._small, *self._bulk))
        assert self._ahead_bytes <= _AHEAD_QUANTA * self.quantum_bytes

    def _next(self) -> _Queue:
        """Whose first entry has its turn; empty: nobody waits."""
        small, bulk = _tidy(self._small), _tidy(self._bulk)
        if small and (not bulk or self._ahead_bytes + small[0][1] <= _AHEAD_QUANTA * self.quantum_bytes):
            return small
        return bulk

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._tokens = min(self._tokens + (now - self._at) * self.bytes_per_s, self.burst_bytes)
            self._at = now

    def _start(self, flow: Flow) -> float:
        return max(self._virtual, flow.finish)

    def _grant(self, flow: Flow, start: float, count: int) -> None:
        self._virtual = max(self._virtual, start)
        flow.finish = start + count
        self._tokens -= count


_Queue = list[tuple[float, int, int, Flow]]  # (start, wanted, number, flow); a heap


def _tidy(queue: _Queue) -> _Queue:
    """The queue without the entries at its head of those who left."""
    while queue and queue[0][3].waits != queue[0][2]:
        heapq.heappop(queue)
    return queue
