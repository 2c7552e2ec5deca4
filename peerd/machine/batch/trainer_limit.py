"""Back-off for a trainer that did not finish what it had: less each time, and more with steps it helps to make.

Half of what it had under way, then half of that, down to one microbatch at a time, then one now and then, after pauses
that double; at once so, where it never finished anything. Each time it is also waited for half as long. Meant alike for
the trainer that cannot reach a stage and the one that only wishes, since nobody can tell them apart: the one recovers.
What a trainer that is gone has earned stays.
"""

from __future__ import annotations

from dataclasses import dataclass

_PAUSE_S = 30.0  # after the first strike of a trainer that has one microbatch at a time
_PAUSE_MOST_S = 1800.0
_CLEAN_STEPS = 4  # steps that it helped make without a strike, for twice as much
_FREE = 64  # more than this under way is no bound any more


@dataclass(slots=True)
class TrainerLimit:
    """One trainer's bounds. `most`: microbatches under way; None: no bound."""

    most: int | None = None
    until: float = 0.0  # nothing before this, while others are there
    strikes: int = 0
    _pause_s: float = 0.0
    _clean: int = 0
    _helped: bool = False

    def strike(self, now: float, under_way: int, proven: bool) -> int:
        """Record that it stood in the way, with so many under way; returns how often by now. `proven`: it has finished
        some before.
        """
        self.strikes += 1
        self._clean, self._helped = 0, False
        if not proven or self.most == 1:
            self._pause_s = min(max(_PAUSE_S, 2 * self._pause_s), _PAUSE_MOST_S)
            self.until = now + self._pause_s
        self.most = max(1, min(under_way, self.most or under_way) // 2) if proven else 1
        return self.strikes

    def helped(self) -> None:
        """It has finished a microbatch of the step under way."""
        self._helped = True

    def step_made(self) -> bool:
        """One more step; False: nothing is left to remember."""
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
