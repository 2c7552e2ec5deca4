"""Lateness of microbatches: which of them their trainers have had for far too long, as of one moment.

While a batch has room, or no other trainer's times are known, only a long lease counts. Once the batch is full and
waits, the other trainers' times are the measure. Both are computed once for a check of a whole batch, and the usual
time only if a microbatch has been open for longer than a lease, so that each microbatch costs one comparison.
Invariant: if one of a trainer's microbatches is overdue, its older ones are, too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final

_SLACK_S: Final = 1e-3
_LATE_FACTOR: Final = 4.0  # times the usual time of others
_NEWCOMER_FACTOR: Final = 1.5  # the same, for a newcomer that the step no longer waits for


class Usual:
    """The trainers' usual times, by trainer: `(seconds from admission to end, time of the last end)`."""

    def __init__(self, trainers: Mapping[str, tuple[float, float]]) -> None:
        self._trainers = trainers
        self._turns_s = sorted(turn_s for turn_s, _ in trainers.values())
        self._last = sorted(((at, name) for name, (_, at) in trainers.items()), reverse=True)[:2]

    def has_others(self, trainer: str) -> bool:
        """True if the times of any other trainer are known."""
        return len(self._trainers) > (trainer in self._trainers)

    def turn_s(self, trainer: str) -> float:
        """Median of the other trainers' seconds from admission to end. Requires `has_others`."""
        turns = self._turns_s
        count = len(turns) - (trainer in self._trainers)
        own = bisect_left(turns, self._trainers[trainer][0]) if trainer in self._trainers else len(turns)
        low, high = ((turns[i] if i < own else turns[i + 1]) for i in ((count - 1) // 2, count // 2))
        return (low + high) / 2

    def last(self, trainer: str) -> float:
        """Time at which any other trainer last finished a microbatch. Requires `has_others`."""
        return next(at for at, name in self._last if name != trainer)


class Lateness:
    """Decides which microbatches are overdue.

    `lease` returns a trainer's own lease, given the normal one; `done_at` returns when it last finished something. No
    lease is shorter than `least_s`. `patience` multiplies all leases. `usual` is called once, when needed. `wait_ends`
    returns the time until which the step waits for a newcomer, or None for other trainers and while the step waits for
    others, too.
    """

    def __init__(
        self,
        now: float,
        lease_s: tuple[float, float],
        least_s: float,
        patience: float,
        usual: Callable[[], Usual],
        lease: Callable[[float, str, float], float],
        done_at: Callable[[str], float],
        wait_ends: Callable[[str], float | None] = lambda trainer: None,
    ) -> None:
        self._now, self._lease_s, self._patience = now, lease_s, patience
        # Connected trainers are in time with what was admitted after this. Only roughly: `is_overdue` decides.
        self.since = now - least_s * patience + _SLACK_S
        self._find_usual, self._lease, self._done_at = usual, lease, done_at
        self._wait_ends = wait_ends
        self._found: Usual | None = None

    @property
    def _usual(self) -> Usual:
        if self._found is None:
            self._found = self._find_usual()
        return self._found

    def is_overdue(self, trainer: str, since: float) -> bool:
        """True if the trainer has had its microbatch, admitted at `since`, for far too long."""
        if (ends := self._wait_ends(trainer)) is not None:
            least_s = _NEWCOMER_FACTOR * self._usual.turn_s(trainer) if self._usual.has_others(trainer) else 0.0
            return self._now > ends and self._now - since > least_s
        lease, first = self._lease_s
        own = self._lease(self._now, trainer, lease)
        if self._now - since <= min(own, first) * self._patience:
            return False  # in time, whatever the others need
        if not self._usual.has_others(trainer):
            return self._now - max(since, self._done_at(trainer)) > first * self._patience
        waited_s = self._now - max(since, self._usual.last(trainer))
        least_s = _LATE_FACTOR * self._usual.turn_s(trainer)
        return waited_s > max(own, least_s) * self._patience
