"""Tab: the use of one resource by one stream, booked in larger steps than it is used.

A tab books up to a step ahead of need and returns decreases late, so that frequent small changes cost little. Sans-IO.
Invariants: the booked amount covers the amount in use and is at most four times as large; an unused tab has nothing
booked.
"""

from __future__ import annotations

from peerd.core.errors import LocalError
from peerd.machine.budget.book import Book, Resource, User


class UsageTab:
    """One stream's use of one resource; `used` is the amount in use."""

    __slots__ = ("_book", "_covered", "_means", "_step", "_user", "used")

    def __init__(self, book: Book, means: Resource, user: User, *, step: int) -> None:
        self.used = 0
        self._book, self._means, self._user = book, means, user
        self._step = step
        self._covered = 0  # amount booked

    def take(self, amount: int = 1) -> str | None:
        """Use `amount` more and return None, or return the reason if there is no room."""
        used = self.used + amount
        if used > self._covered and (closed := self._ask(used - self._covered)) is not None:
            return closed
        self.used = used
        return None

    def give(self, amount: int = 1) -> None:
        """Use `amount` less."""
        used = self.used = self.used - amount
        if used < 0:
            raise LocalError("more was returned than taken")
        if used * 4 <= self._covered:
            keep = used + min(self._step, used)
            if keep < self._covered:
                self._book.give(self._means, self._user, self._covered - keep)
                self._covered = keep

    def hold(self, amount: int) -> str | None:
        """Set the amount in use. If there is no room, keep the old amount and return the reason."""
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
