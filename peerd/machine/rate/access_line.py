"""Rate of this machine's access line, from what really passed: the most in each direction over short windows.

Sums over all connections, since they share the line, of bytes that have crossed it: acknowledged by the other side, or
come in here; what waits in buffers is not counted. Looking takes time, much on a busy machine, so a window lasts from
before its first look to after its last: the estimate is a lower bound that was proven, not more than the line did
carry for a second. Acknowledgements that had waited in a queue on their way back, and then come at once, look like a
faster line: what is acknowledged now was sent a round trip ago, so a window whose round trips became shorter is taken
to be longer by as much. (Of the rates of acknowledgements and of sending BBR takes the lower one, too:
draft-cheng-iccrg-delivery-rate-estimation.) What a queue holds for less than a round trip shows remains; a second
makes it small.

Windows in which little passed say nothing. Age is counted in minutes in which there was traffic to judge by: an idle
line keeps its estimate, one that became slower is believed slower after ACTIVE_MINUTES. No clock here: times are
arguments. A peer can not raise our estimate but by sending or taking bytes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Final

WINDOW_S: Final = 1.0
WINDOW_BYTES: Final = 128 * 1024  # fewer in a window are not judged by: 1 Mb/s
ACTIVE_MINUTES: Final = 60
STEP: Final = 1.1  # what is told changes by so much or not at all: shares need not follow every tremor
_MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Count:
    """Bytes of all connections that crossed the line, since some moment."""

    sent: int
    received: int
    round_trip_s: float = 0.0  # of what was sent, as it was in the end; a mean over bytes


class LineRate:
    """The estimate of one direction. `minutes`: those with traffic that count, the newest."""

    def __init__(self, minutes: int = ACTIVE_MINUTES) -> None:
        self._minutes: deque[tuple[int, float]] = deque(maxlen=minutes)  # (number, most in it), with traffic
        self._told = 0.0
        self.now_bytes_per_s = 0.0  # in the last window

    def note(self, now: float, count: int, seconds: float) -> None:
        """So many bytes have passed in the last `seconds`."""
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
        """Most bytes/s in any of the minutes kept. 0: nothing is known."""
        return max((rate for _, rate in self._minutes), default=0.0)

    def told_bytes_per_s(self) -> float:
        """The estimate for others: it changes in steps. 0: nothing is known."""
        most = self.most_bytes_per_s
        if not self._told or not self._told / STEP < most < self._told * STEP:
            self._told = most
        return self._told


class AccessLine:
    """The access line: an estimate of each direction."""

    def __init__(self) -> None:
        self.up, self.down = LineRate(), LineRate()
        self._looks: deque[tuple[float, Count]] = deque()  # when it began, what had passed; the last window's
        self._passed = Count(0, 0)

    def note(self, begun: float, now: float, passed: Count) -> None:
        """A look that began then and ends now found that so much has passed since the one before."""
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
