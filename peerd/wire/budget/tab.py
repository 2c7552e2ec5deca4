"""Tabs: uses of one resource that are not returned to the book one by one.

A `UsageTab` books in larger steps than it is used: up to a step ahead of need, and it returns decreases late, so that
frequent small changes cost little. A `MinuteTab` returns each use a minute later, so that the book bounds a rate.
Sans-IO. Invariants: the amount that a usage tab has booked covers the amount in use and is at most four times as large;
an unused one has nothing booked. The book's use of a minute tab's resource is the number of its uses within the last
minute.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from peerd.core.errors import LocalError
from peerd.wire.budget.book import Book, Resource, User
from peerd.wire.rate.quota import LogLimit

_MINUTE_S: Final = 60.0


class UsageTab:
    """One stream's use of one resource; `used` is the amount in use."""

    __slots__ = ("_book", "_covered", "_means", "_step", "_user", "used")

    def __init__(self, book: Book, means: Resource, user: User, *, step: int) -> None:
        self.used = 0
        self._book, self._means, self._user = book, means, user
        self._step = step
        self._covered = 0  # amount booked

    def take(self, amount: int = 1) -> str | None:
        """Use `amount` more and return None, or return the reason if that would exceed a bound."""
        used = self.used + amount
        if used > self._covered and (closed := self._ask(used - self._covered)) is not None:
            return closed
        self.used = used
        return None

    def give(self, amount: int = 1) -> None:
        """Return `amount` of what was taken."""
        used = self.used = self.used - amount
        if used < 0:
            raise LocalError("more was returned than taken")
        if used * 4 <= self._covered:
            keep = used + min(self._step, used)
            if keep < self._covered:
                self._book.give(self._means, self._user, self._covered - keep)
                self._covered = keep

    def hold(self, amount: int) -> str | None:
        """Set the amount in use. If that would exceed a bound, keep the old amount and return the reason."""
        if amount > self.used:
            return self.take(amount - self.used)
        self.give(self.used - amount)
        return None

    def _ask(self, missing: int) -> str | None:
        closed = None
        for count in (missing + min(self._step, self.used), missing):
            closed = self._book.take(self._means, self._user, count)
            if closed is None:
                self._covered += count
                break
        return closed


class MinuteTab:
    """The uses of one resource within the last minute."""

    def __init__(self, book: Book, means: Resource) -> None:
        self._book, self._means = book, means
        self._uses: deque[tuple[float, User]] = deque()  # oldest first

    def take(self, now: float, user: User) -> str | None:
        """Book one use and return None, or return the reason if that would exceed a bound."""
        self.forget(now)
        closed = self._book.take(self._means, user)
        if closed is None:
            self._uses.append((now, user))
        return closed

    def take_back(self, user: User) -> None:
        """Remove the latest use of `user`, if it was within the last minute."""
        latest = next((use for use in reversed(self._uses) if use[1] == user), None)
        if latest is not None:
            self._uses.remove(latest)
            self._book.give(self._means, user)

    def objection(self, now: float, user: User) -> str | None:
        """Reason why `user` may not use one more now, or None if it may."""
        if not self._uses:
            return None
        self.forget(now)
        return self._book.objection(self._means, user)

    def forget(self, now: float) -> None:
        while self._uses and self._uses[0][0] <= now - _MINUTE_S:
            self._book.give(self._means, self._uses.popleft()[1])


class UnprovenCalls:
    """The calls of the last minute with an invalid proof, counted against their callers.

    Checking a proof means verifying a signature, which costs more than sending the call. So a caller that continues is
    refused before its proof is verified. Hostile input: any number of calls; the book bounds what is stored.
    """

    def __init__(self, book: Book) -> None:
        self._calls = MinuteTab(book, Resource.UNPROVEN)
        self._log_limit = LogLimit[str](_MINUTE_S)  # by peer

    def objection(self, now: float, user: User) -> str | None:
        """Reason to refuse a call of `user` before its proof is verified, or None."""
        return self._calls.objection(now, user)

    def count(self, now: float, user: User) -> str | None:
        """Record a call of `user` with an invalid proof.

        Returns the text to log if the caller has reached its limit, at most once a minute per peer, else None.
        """
        self._calls.take(now, user)
        why = self._calls.objection(now, user)
        return why if why is not None and self._log_limit.may_log(now, user.peer) else None
