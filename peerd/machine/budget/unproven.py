"""Unproven calls: the calls of the last minute with an invalid proof, counted against their callers.

Checking a proof means verifying a signature, which costs more than sending the call. So a caller that continues is
refused before its proof is verified. Sans-IO. Invariant: the book's use of Means.UNPROVEN is the number of such calls
within the last minute. Hostile input: any number of calls; the book bounds what is stored.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.machine.budget.book import Book, Resource, User

_MINUTE_S: Final = 60.0
_NAMED: Final = 1024  # peers that were logged lately


class UnprovenCalls:
    """The recent unproven calls to one host."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._counted: deque[tuple[float, User]] = deque()  # oldest first
        self._named = BoundedDict[str, float](_NAMED)  # peer -> when it may be logged again

    def count(self, now: float, user: User) -> str | None:
        """Record a call of `user` with an invalid proof.

        Returns the text to log if the caller has reached its limit, at most once a minute per peer, else None.
        """
        self._forget(now)
        if self._book.take(Resource.UNPROVEN, user) is None:
            self._counted.append((now, user))
        why = self._book.objection(Resource.UNPROVEN, user)
        if why is None or now < self._named.get(user.peer, 0.0):
            return None
        self._named[user.peer] = now + _MINUTE_S
        return why

    def objection(self, now: float, user: User) -> str | None:
        """Reason to refuse a call of `user` before its proof is verified, or None."""
        if not self._counted:
            return None
        self._forget(now)
        return self._book.objection(Resource.UNPROVEN, user)

    def _forget(self, now: float) -> None:
        while self._counted and self._counted[0][0] <= now - _MINUTE_S:
            self._book.give(Resource.UNPROVEN, self._counted.popleft()[1])
