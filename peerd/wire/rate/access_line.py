"""Rate of this machine's internet connection (its access line): the maximum in each direction over short windows.

Sums the bytes that have crossed the line over all connections, because they share it: acknowledged by the other side,
or received here; buffered bytes do not count. Sampling takes time, a lot of it on a busy machine, so a window lasts
from before its first sample to after its last: the estimate is a proven lower bound, never more than the line carried
for a second. Acknowledgements that waited in a queue on their way back, and then arrive at once, look like a faster
line. Bytes that are acknowledged now were sent a round trip ago, so if the round trip became shorter during a window,
the window counts as longer by the difference. (BBR, too, uses the lower of the rates of acknowledging and of sending:
draft-cheng-iccrg-delivery-rate-estimation.) The error from queues of less than a round trip remains; over a second it
is small.

Windows with little traffic are ignored. Age is counted in minutes with enough traffic: an idle line keeps its estimate,
and a line that became slower gets a lower estimate after ACTIVE_MINUTES. No clock: times are arguments. A peer can
raise our estimate only by really sending or receiving bytes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

WINDOW_S: Final = 1.0
WINDOW_BYTES: Final = 128 * 1024  # windows with fewer bytes (1 Mb/s) are ignored
ACTIVE_MINUTES: Final = 60
STEP: Final = 1.1  # least ratio by which the reported rate changes, so that shares do not follow small fluctuations
_MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Count:
    """Total bytes of all connections that have crossed the access line since some moment."""

    sent: int
    received: int
    round_trip_s: float = 0.0  # latest round trip of the sent bytes; a mean over bytes


class LineRate:
    """Estimated rate of one direction. `minutes`: number of newest minutes with traffic that count."""

    def __init__(self, minutes: int = ACTIVE_MINUTES) -> None:
        self._minutes: deque[tuple[int, float]] = deque(maxlen=minutes)  # (number, highest rate in it), with traffic
        self._told = 0.0
        self.now_bytes_per_s = 0.0  # rate of the last window

    def note(self, now: float, count: int, seconds: float) -> None:
        """Record that `count` bytes passed in the last `seconds`."""
        rate = self.now_bytes_per_s = count / seconds
        if count < WINDOW_BYTES:
            return
        minute = int(now // _MINUTE_S)
        if self._minutes and self._minutes[-1][0] >= minute:
            self._minutes[-1] = (minute, max(self._minutes[-1][1], rate))
        else:
            self._minutes.append((minute, rate))

    @property
    def most_bytes_per_s(self) -> float:
        """Highest rate in any of the minutes kept, in bytes/s; 0 if unknown."""
        return max((rate for _, rate in self._minutes), default=0.0)

    def told_bytes_per_s(self) -> float:
        """The estimate to report, in bytes/s, which changes in steps; 0 if unknown."""
        most = self.most_bytes_per_s
        if not self._told or not self._told / STEP < most < self._told * STEP:
            self._told = most
        return self._told


class AccessLine:
    """Estimated rates of this machine's internet connection, one for each direction."""

    def __init__(self) -> None:
        self.up, self.down = LineRate(), LineRate()
        self._looks: deque[tuple[float, Count]] = deque()  # start and total count of each sample in the last window
        self._passed = Count(0, 0)

    def note(self, begun: float, now: float, passed: Count) -> None:
        """Record a sample, taken from `begun` to `now`: the bytes that have passed since the previous one."""
        before = self._passed
        passed = replace(passed, sent=before.sent + passed.sent, received=before.received + passed.received)
        self._passed = passed
        looks = self._looks
        looks.append((begun, passed))
        while len(looks) > 2 and begun - looks[1][0] >= WINDOW_S * 0.9:
            looks.popleft()
        at, first = looks[0]
        seconds = now - at
        if seconds >= WINDOW_S * 0.9 and math.isfinite(seconds):
            sooner_s = max(0.0, first.round_trip_s - passed.round_trip_s)
            self.up.note(now, passed.sent - first.sent, seconds + sooner_s)
            self.down.note(now, passed.received - first.received, seconds)
