"""Back-off for a trainer that did not finish its microbatches: it gets fewer, and more again as it helps to make steps.

It gets half of what it had under way, then half of that, down to one microbatch at a time, then one after pauses that
double. A trainer that never finished anything starts with the pauses. Each time, steps also wait for it half as long.
The rule is the same for a trainer that cannot reach a stage and for one that only requests microbatches, since nobody
can tell them apart; only the first recovers. A trainer that disconnects keeps its limit.
"""

from __future__ import annotations

from dataclasses import dataclass

_PAUSE_S = 30.0  # first pause of a trainer that has one microbatch at a time
_PAUSE_MOST_S = 1800.0
_CLEAN_STEPS = 4  # steps that it must help to make without a strike until its limit doubles
_FREE = 64  # a limit above this number of microbatches under way is removed


@dataclass(slots=True)
class TrainerLimit:
    """One trainer's limits. `most`: microbatches in flight, or None for no limit."""

    most: int | None = None
    until: float = 0.0  # no microbatches before this time, while others are connected
    strikes: int = 0
    _pause_s: float = 0.0
    _clean: int = 0
    _helped: bool = False

    def strike(self, now: float, under_way: int, proven: bool) -> int:
        """Record that it held up a step with `under_way` microbatches; returns its number of strikes.

        `proven`: it has finished some microbatches before.
        """
        self.strikes += 1
        self._clean, self._helped = 0, False
        if not proven or self.most == 1:
            self._pause_s = min(max(_PAUSE_S, 2 * self._pause_s), _PAUSE_MOST_S)
            self.until = now + self._pause_s
        self.most = max(1, min(under_way, self.most or under_way) // 2) if proven else 1
        return self.strikes

    def helped(self) -> None:
        """Record that it has finished a microbatch of the current step."""
        self._helped = True

    def step_made(self) -> bool:
        """Record a completed step; returns False if the trainer has no limit any more."""
        if not self._helped:
            return True
        self._helped = False
        self._clean += 1
        if self._clean >= _CLEAN_STEPS:
            self._clean, self._pause_s = 0, self._pause_s / 2 if self._pause_s > _PAUSE_S else 0.0
            if not self._pause_s and self.most is not None:
                self.most = self.most * 2 if self.most * 2 <= _FREE else None
                self.strikes //= 2
        return self.most is not None
