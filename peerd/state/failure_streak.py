"""FailureStreak: consecutive failures of one task, when to try again, and which of them to log.

The pause grows with each failure. A cause is logged at its first occurrence, and after that at most once per REMIND_S,
with the number of failures since the last line: a task that fails all day writes few lines. Pure bookkeeping: times are
arguments, in seconds; a cause is any key, such as the name of an error's type.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

from peerd.core.bounded_dict import BoundedDict
from peerd.wire.rate.backoff import backoff_s

REMIND_S: Final = 600.0
_CAUSES: Final = 32


class _Cause(NamedTuple):
    """A cause of failures: the time of its last log line, and the number of failures since then."""

    logged_at: float
    unlogged: int


class FailureStreak:
    """The failures since the last success. `first_s` and `longest_s` bound the pause before the next attempt."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self.count = 0
        self.reason: str | None = None  # of the last failure
        self._first_s, self._longest_s = first_s, longest_s
        self._causes = BoundedDict[Hashable, _Cause](_CAUSES)

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt; 0 without a failure."""
        return backoff_s(self.count, self._first_s, self._longest_s) if self.count else 0.0

    def failed(self, now: float, cause: Hashable, reason: str) -> int | None:
        """Count a failure. Returns the number of failures of this cause to log in one line, or None for no line."""
        self.count += 1
        self.reason = reason
        known = self._causes.get(cause)
        unlogged = 1 if known is None else known.unlogged + 1
        due = known is None or now >= known.logged_at + REMIND_S
        self._causes[cause] = _Cause(now, 0) if known is None or due else _Cause(known.logged_at, unlogged)
        return unlogged if due else None

    def succeeded(self) -> int:
        """End the streak; returns its number of failures. Causes are kept, so that each is still logged rarely."""
        count, self.count, self.reason = self.count, 0, None
        return count
