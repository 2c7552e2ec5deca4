"""Rate of a peer's work in samples per second: smoothed over steps while work is done, falling to zero when none is.

What this is worth: over a step it is what counted, the time for averaging included. Between two signs of work there are
usual pauses, such as averaging; longer than that, and the rate falls, so that a run that stands still shows no speed.
A pause that was much longer than the usual one makes the next patience a few times longer, not as long as itself.

No clock here: times are arguments.
"""

from __future__ import annotations

from typing import Final

_SMOOTHING: Final = 0.2
_LEAST_S: Final = 3.0  # patience where pauses are short
_TIMES: Final = 2.0  # the usual longest pause: so much longer is still work
_GROWTH: Final = 4.0  # the usual pause at most, from one step to the next


class WorkRate:
    """See the module's header."""

    def __init__(self, now: float) -> None:
        self._rate = 0.0
        self._stepped_at = self._worked_at = now
        self._longest_s, self._usual_s = 0.0, _LEAST_S  # pauses: the longest of this step, and of steps before

    def worked(self, now: float) -> None:
        """A microbatch is done."""
        self._longest_s = max(self._longest_s, now - self._worked_at)
        self._worked_at = now

    def stepped(self, now: float, samples: float) -> None:
        """A step is made, in which so many of our samples count."""
        self.worked(now)
        self._usual_s, self._longest_s = min(self._longest_s, _GROWTH * self._usual_s + _LEAST_S), 0.0
        if samples:
            rate = samples / max(now - self._stepped_at, 1e-6)
            before = self.at(now)
            self._rate = rate if not before else before + _SMOOTHING * (rate - before)
        self._stepped_at = now

    def at(self, now: float) -> float:
        """Samples per second, as of now."""
        patience_s = _LEAST_S + _TIMES * self._usual_s
        idle_s = now - self._worked_at
        return self._rate * min(1.0, max(0.0, 2.0 - idle_s / patience_s))
