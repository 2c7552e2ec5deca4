"""Bound on the time that steps wait for newcomers, trainers that have not yet helped to make a step.

A newcomer may be slow, or take its place in the batch and do nothing; nobody can tell these apart beforehand. So steps
wait for newcomers alone, but for a sixteenth of the time at most, and one step for half of what is left of that. Then
the trainers that have helped before do the rest of the batch, which counts as part of the wait. Once the time is used
up, newcomers get no place until some more has passed. A newcomer that keeps the others' pace is waited for by nobody.
Hostile input: any number of identities at any number of places use up what all newcomers have together, and no more.
"""

from __future__ import annotations

from typing import Final

_SHARE: Final = 1 / 16  # of the time
_MOST_S: Final = 120.0  # what half an hour without newcomers saves up
_FIRST_S: Final = 8.0
_PART: Final = 1 / 2  # of what is left, for one step


class NewcomerWaits:
    """What is left of the time in which steps wait for newcomers, and the wait that is under way."""

    def __init__(self) -> None:
        self._left_s = _FIRST_S  # below 0: too much was used
        self._at: float | None = None  # when the last wait ended, or the first look was
        self._since: float | None = None  # when the wait under way began

    def look(self, now: float, waits: bool) -> None:
        """Record whether the step waits because of newcomers alone."""
        if self._at is None:
            self._at = now
        if waits == self.is_on:
            return
        if self._since is not None:
            self._left_s = max(-_MOST_S, self._left_s - (now - self._since))
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
        """How long a step may wait for newcomers alone, where none does yet; below 0: too much time was used."""
        return self._left(now) * _PART

    def end(self, most_s: float) -> float:
        """Returns the time until which the step under way waits for a newcomer, for `most_s` at most."""
        assert self._since is not None
        return self._since + min(most_s, max(0.0, self._left_s * _PART))

    def _left(self, now: float) -> float:
        earned_s = (now - self._at) * _SHARE if self._at is not None and not self.is_on else 0.0
        return min(self._left_s + earned_s, _MOST_S)
