"""Bound on the time that steps wait for newcomers, trainers that have not yet helped to make a step.

A newcomer may be slow, or take its place in the batch and do nothing; nobody can tell these apart beforehand. So steps
wait for newcomers alone, but for a sixteenth of the time at most, and one step for half of what is left of that. Then
the trainers that have helped before do the rest of the batch, which counts as part of the wait. Once the time is used
up, newcomers get no place until some more has passed. Nobody waits for a newcomer that keeps the others' pace.
Hostile input: any number of identities at any number of places use up what all newcomers have together, and no more.
"""

from __future__ import annotations

from typing import Final

_SHARE: Final = 1 / 16  # of the time
_MOST_S: Final = 120.0  # that can be saved up: half an hour without newcomers,
_MOST_TURNS: Final = 100  # or so many times as long as a microbatch takes the others
_FIRST_S: Final = 8.0  # there at first,
_FIRST_TURNS: Final = 16  # likewise
_TURN_KEEP: Final = 0.9  # of the others' time for a microbatch, at each new one
_PART: Final = 1 / 2  # of what is left, for one step


class NewcomerWaits:
    """Account of the time that steps may wait for newcomers."""

    def __init__(self) -> None:
        self._left_s = _FIRST_S  # below 0: too much was used
        self._at: float | None = None  # when the last wait ended, or the first look was
        self._since: float | None = None  # when the wait under way began
        self.turn_s = 0.0  # how long a microbatch takes the others; 0: not known

    def turn(self, turn_s: float) -> None:
        """A microbatch has taken one of the others so long."""
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
        """Returns how long the next step may wait for newcomers alone; below 0: steps have waited for too long."""
        return self._left(now) * _PART

    def end(self, most_s: float) -> float:
        """Returns the time until which the step under way waits for a newcomer, for `most_s` at most."""
        assert self._since is not None
        return self._since + min(most_s, max(0.0, self._left_s * _PART))

    def _left(self, now: float) -> float:
        earned_s = (now - self._at) * _SHARE if self._at is not None and not self.is_on else 0.0
        return min(self._left_s + earned_s, self._largest_s)

    @property
    def _largest_s(self) -> float:
        return max(_MOST_S, _MOST_TURNS * self.turn_s)
