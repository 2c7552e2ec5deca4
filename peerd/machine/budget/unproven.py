"""Unproven calls: calls of the last minute that showed a proof which did not hold, counted against whoever made them.

To find that out takes a signature check, which costs more than sending the call: a caller that goes on is refused
before anything is checked. Sans-IO. Invariant: the book has of Means.UNPROVEN what came within the last minute. Hostile
input: any number of calls; what is remembered is bounded by the book.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.machine.budget.book import Book, Means, User

_MINUTE_S: Final = 60.0
_NAMED: Final = 1024  # peers


class UnprovenCalls:
    """See the module's header. One for a host's calls."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._counted: deque[tuple[float, User]] = deque()  # oldest first
        self._named = BoundedDict[str, float](_NAMED)  # peer -> when the log may name it again

    def count(self, now: float, user: User) -> str | None:
        """A call of `user` showed a proof that does not hold. Returns what to log of it, once in a minute, or None."""
        self._forget(now)
        if self._book.take(Means.UNPROVEN, user) is None:
            self._counted.append((now, user))
        why = self._book.objection(Means.UNPROVEN, user)
        if why is None or now < self._named.get(user.peer, 0.0):
            return None
        self._named[user.peer] = now + _MINUTE_S
        return why

    def objection(self, now: float, user: User) -> str | None:
        """Reason to refuse a call of `user` without a look at its proof, or None."""
        if not self._counted:
            return None
        self._forget(now)
        return self._book.objection(Means.UNPROVEN, user)

    def _forget(self, now: float) -> None:
        while self._counted and self._counted[0][0] <= now - _MINUTE_S:
            self._book.give(Means.UNPROVEN, self._counted.popleft()[1])
