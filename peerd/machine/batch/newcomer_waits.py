"""Bound on the time that steps wait for newcomers: trainers that have not yet helped to make a step.

A newcomer may be slow, or may take its slot in the batch and do nothing; nobody can tell these apart beforehand. So
steps wait for newcomers alone for at most a sixteenth of the time, and one step for half of what is left of that. Then
trainers that have helped before compute the rest of the batch, which counts as part of the wait. When the time is used
up, newcomers get no slot until more has passed. A newcomer that keeps pace with the others causes no wait.

Hostile input: any number of identities at any number of places use up the time of all newcomers, and no more.
"""

from __future__ import annotations

from typing import Final

_SHARE: Final = 1 / 16  # of the time that passes
_MOST_S: Final = 120.0  # that can be saved up, in half an hour without newcomers,
_MOST_TURNS: Final = 100  # or this many times the others' time for a microbatch
_FIRST_S: Final = 8.0  # available at first,
_FIRST_TURNS: Final = 16  # likewise
_TURN_KEEP: Final = 0.9  # weight of the earlier value in the others' mean time for a microbatch
_PART: Final = 1 / 2  # of what is left, for one step


class NewcomerWaits:
    """Account of the time that steps may wait for newcomers."""

    def __init__(self) -> None:
        self._left_s = _FIRST_S  # negative: too much was used
        self._at: float | None = None  # end of the last wait, or the first call of `look`
        self._since: float | None = None  # start of the present wait
        self.turn_s = 0.0  # the others' mean time for a microbatch; 0: unknown

    def turn(self, turn_s: float) -> None:
        """Record that one of the others took `turn_s` seconds for a microbatch."""
        if self.turn_s:
            self.turn_s = self.turn_s * _TURN_KEEP + turn_s * (1 - _TURN_KEEP)
        else:
            self.turn_s, self._left_s = turn_s, max(self._left_s, _FIRST_TURNS * turn_s)

    def look(self, now: float, waits: bool) -> None:
        """Record whether the step waits because of newcomers alone."""
        if self._at is None:
            self._at = now
        if waits == self.is_on:
            return
        if self._since is not None:
            self._left_s = max(-self._largest_s, self._left_s - (now - self._since))
            self._since = None
        else:
            self._left_s = self._left(now)
            self._since = now
        self._at = now

    @property
    def is_on(self) -> bool:
        """True while the step waits because of newcomers alone."""
        return self._since is not None

    def most_s(self, now: float) -> float:
        """Seconds that the next step may wait for newcomers alone; negative if steps have waited for too long."""
        return self._left(now) * _PART

    def end(self, most_s: float) -> float:
        """Time until which the current step waits for a newcomer, at most `most_s` from the start of the wait."""
        assert self._since is not None
        return self._since + min(most_s, max(0.0, self._left_s * _PART))

    def _left(self, now: float) -> float:
        earned_s = (now - self._at) * _SHARE if self._at is not None and not self.is_on else 0.0
        return min(self._left_s + earned_s, self._largest_s)

    @property
    def _largest_s(self) -> float:
        return max(_MOST_S, _MOST_TURNS * self.turn_s)
