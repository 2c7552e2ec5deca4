"""A tab: what one stream has of one means. The book is asked ahead of need, up to a step, and told of a decrease late:
so what is small and often costs little.

Sans-IO. Invariants: what the book has of a tab covers what is used, and is four times that at most; a tab of which
nothing is used has nothing in the book.
"""

from __future__ import annotations

from peerd.core.errors import LocalError
from peerd.machine.budget.book import Book, Means, User


class Tab:
    """See the module's header."""

    __slots__ = ("_book", "_covered", "_means", "_step", "_user", "used")

    def __init__(self, book: Book, means: Means, user: User, *, step: int) -> None:
        self.used = 0
        self._book, self._means, self._user = book, means, user
        self._step = step
        self._covered = 0  # by the book

    def take(self, amount: int = 1) -> str | None:
        """Use so much more, if there is room; else say why there is none."""
        used = self.used + amount
        if used > self._covered and (closed := self._ask(used - self._covered)) is not None:
            return closed
        self.used = used
        return None

    def give(self, amount: int = 1) -> None:
        """Use so much less."""
        used = self.used = self.used - amount
        if used < 0:
            raise LocalError("more was given back than was taken")
        if used * 4 <= self._covered:
            keep = used + min(self._step, used)
            if keep < self._covered:
                self._book.give(self._means, self._user, self._covered - keep)
                self._covered = keep

    def hold(self, amount: int) -> str | None:
        """Use so much, no more and no less; or as much as before, and say why there is no room."""
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
