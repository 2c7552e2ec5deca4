"""A tab: what one stream has of one means. The book is asked in steps, so that what is small and often costs little.

Sans-IO. Invariants: what the book has of a tab covers what is used beyond `free`, and exceeds it by two steps at most;
a tab of which nothing is used has nothing in the book.
"""

from __future__ import annotations

from peerd.core.errors import LocalError
from peerd.machine.book import Book, Means, User


class Tab:
    """See the module's header. `free`: so much is not written down, for whoever may have a tab is counted elsewhere."""

    __slots__ = ("_book", "_covered", "_free", "_means", "_step", "_user", "used")

    def __init__(self, book: Book, means: Means, user: User, *, step: int, free: int = 0) -> None:
        self.used = 0
        self._book, self._means, self._user = book, means, user
        self._step, self._free = step, free
        self._covered = free  # the book has what is above `free`

    def take(self, amount: int = 1) -> str | None:
        """Use so much more, if there is room; else say why there is none."""
        used = self.used + amount
        if used > self._covered:
            closed = self._ask(used - self._covered)
            if closed is not None:
                return closed
        self.used = used
        return None

    def give(self, amount: int = 1) -> None:
        """Use so much less."""
        if amount > self.used:
            raise LocalError("more was given back than was taken")
        self.used -= amount
        if self._covered > self._free:
            keep = self.used + self._step if self.used > self._free else self._free
            if keep == self._free or self._covered - keep >= self._step:
                self._book.give(self._means, self._user, self._covered - keep)
                self._covered = keep

    def clear(self) -> None:
        """Use nothing more."""
        self.give(self.used)

    def _ask(self, missing: int) -> str | None:
        closed = None
        for count in (self._step, missing) if missing < self._step else (missing,):
            closed = self._book.take(self._means, self._user, count)
            if closed is None:
                self._covered += count
                break
        return closed
