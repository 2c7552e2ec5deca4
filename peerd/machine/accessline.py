"""What this machine's own line carries, from what really passed: the most in each direction over short windows.

Sums over all connections, since they share the line, of bytes that have crossed it: acknowledged by the other side, or
come in here; what waits in buffers is not counted. Looking takes time, much on a busy machine, so a window lasts from
before its first look to after its last: the estimate is a lower bound that was proven, never more than the line did
carry for half a second. Windows in which little passed say nothing. Age is counted in minutes in which
there was traffic to judge by: an idle line keeps its estimate, one that became slower is believed slower after
ACTIVE_MINUTES. No clock here: times are arguments. A peer can not raise our estimate but by sending or taking bytes.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 0.5
WINDOW_BYTES: Final = 64 * 1024  # fewer in a window are not judged by: 1 Mb/s
ACTIVE_MINUTES: Final = 60
STEP: Final = 1.1  # what is told changes by so much or not at all: shares need not follow every tremor
_MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Count:
    """Bytes of all connections that crossed the line, since some moment."""

    sent: int
    received: int


class Direction:
    """The estimate of one direction."""

    def __init__(self) -> None:
        self._minutes: deque[tuple[int, float]] = deque(maxlen=ACTIVE_MINUTES)  # (number, most in it), with traffic
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
        """0: nothing is known."""
        return max((rate for _, rate in self._minutes), default=0.0)

    def told_bytes_per_s(self) -> float:
        """The estimate for others: it changes in steps. 0: nothing is known."""
        most = self.most_bytes_per_s
        if not self._told or not self._told / STEP < most < self._told * STEP:
            self._told = most
        return self._told


class AccessLine:
    """Both directions."""

    def __init__(self) -> None:
        self.up, self.down = Direction(), Direction()
        self._looks: deque[tuple[float, int, int]] = deque()  # (begun at, sent, received), the last window's
        self._sent = self._received = 0

    def note(self, begun: float, now: float, passed: Count) -> None:
        """A look that began then and ends now found that so much has passed since the one before."""
        self._sent += passed.sent
        self._received += passed.received
        looks = self._looks
        looks.append((begun, self._sent, self._received))
        while len(looks) > 2 and begun - looks[1][0] >= WINDOW_S * 0.9:
            looks.popleft()
        at, sent, received = looks[0]
        seconds = now - at
        if seconds >= WINDOW_S * 0.9 and math.isfinite(seconds):
            self.up.note(now, self._sent - sent, seconds)
            self.down.note(now, self._received - received, seconds)
