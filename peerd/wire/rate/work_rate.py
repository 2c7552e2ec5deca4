"""Rate of a peer's work in samples per second: smoothed over steps, and falling to zero when no work is done.

Over a step, the rate is the samples that counted per second, including the time for averaging. Pauses between two signs
of work are normal, for example for averaging; after a longer pause the rate falls, so that a run that does not progress
shows no speed. After a pause much longer than usual, the next patience grows only by a small factor, not to the length
of that pause.

No clock: times are arguments.
"""

from __future__ import annotations

from typing import Final

_SMOOTHING: Final = 0.2
_LEAST_S: Final = 3.0  # least patience
_TIMES: Final = 2.0  # patience as a multiple of the usual longest pause
_GROWTH: Final = 4.0  # greatest growth of the usual pause from one step to the next


class WorkRate:
    """The smoothed rate of one peer's work."""

    def __init__(self, now: float) -> None:
        self._rate = 0.0
        self._stepped_at = self._worked_at = now
        self._longest_s, self._usual_s = 0.0, _LEAST_S  # longest pause of this step, and the usual one

    def worked(self, now: float) -> None:
        """Record a finished microbatch."""
        self._longest_s = max(self._longest_s, now - self._worked_at)
        self._worked_at = now

    def stepped(self, now: float, samples: float) -> None:
        """Record a finished step to which `samples` of our samples contributed."""
        self.worked(now)
        self._usual_s, self._longest_s = min(self._longest_s, _GROWTH * self._usual_s + _LEAST_S), 0.0
        if samples:
            rate = samples / max(now - self._stepped_at, 1e-6)
            before = self.at(now)
            self._rate = rate if not before else before + _SMOOTHING * (rate - before)
        self._stepped_at = now

    def at(self, now: float) -> float:
        """Samples per second at time `now`."""
        patience_s = _LEAST_S + _TIMES * self._usual_s
        idle_s = now - self._worked_at
        return self._rate * min(1.0, max(0.0, 2.0 - idle_s / patience_s))
