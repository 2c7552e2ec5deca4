"""Lateness of microbatches: which of them their trainers have had for far too long, as of one moment.

While a batch has room, or nobody shows what is usual, only a long lease counts. Once the batch is full and waits, what
the other trainers take is the measure. Both are worked out once for a look at a whole batch, and what is usual only
when one has been open for longer than a lease, so that each microbatch costs a comparison. Invariant: of one trainer's
microbatches an older one is overdue when a younger one is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final

_SLACK_S: Final = 1e-3
_LATE_FACTOR: Final = 4.0  # times as long as it usually takes others
_NEWCOMER_FACTOR: Final = 1.5  # the same, for a newcomer for which nobody waits any longer


class Usual:
    """The trainers' usual times: `(seconds from admission to end, time of the last end)` by trainer."""

    def __init__(self, trainers: Mapping[str, tuple[float, float]]) -> None:
        self._trainers = trainers
        self._turns_s = sorted(turn_s for turn_s, _ in trainers.values())
        self._last = sorted(((at, name) for name, (_, at) in trainers.items()), reverse=True)[:2]

    def has_others(self, trainer: str) -> bool:
        """True when any other trainer shows what is usual."""
        return len(self._trainers) > (trainer in self._trainers)

    def turn_s(self, trainer: str) -> float:
        """The median of the others' seconds; there must be others."""
        turns = self._turns_s
        count = len(turns) - (trainer in self._trainers)
        own = bisect_left(turns, self._trainers[trainer][0]) if trainer in self._trainers else len(turns)
        low, high = ((turns[i] if i < own else turns[i + 1]) for i in ((count - 1) // 2, count // 2))
        return (low + high) / 2

    def last(self, trainer: str) -> float:
        """The time at which another trainer finished something last; there must be others."""
        return next(at for at, name in self._last if name != trainer)


class Lateness:
    """See the module's header. `lease` shortens a lease by what is known of a trainer, `done_at` is its last end.

    `least_s`: no lease is shorter; `usual` is asked once, when it matters. `wait_ends` gives the time
    until which the step waits for a newcomer; None for any other trainer, and while the step waits for others too.
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
        # Whoever is here is in time with what was admitted after this. Not to the last digit: `is_overdue` decides.
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
        """True when the trainer has had its microbatch, admitted at `since`, for far too long."""
        if (ends := self._wait_ends(trainer)) is not None:
            least_s = _NEWCOMER_FACTOR * self._usual.turn_s(trainer) if self._usual.has_others(trainer) else 0.0
            return self._now > ends and self._now - since > least_s
        lease, first = self._lease_s
        own = self._lease(self._now, trainer, lease)
        if self._now - since <= min(own, first) * self._patience:
            return False  # whatever others take
        if not self._usual.has_others(trainer):
            return self._now - max(since, self._done_at(trainer)) > first * self._patience
        waited_s = self._now - max(since, self._usual.last(trainer))
        least_s = _LATE_FACTOR * self._usual.turn_s(trainer)
        return waited_s > max(own, least_s) * self._patience
