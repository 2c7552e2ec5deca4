"""Version numbers of what each reader sees: a reader that has the newest waits, without being woken by what concerns
others.

One counter numbers all changes; a reader's version is the number of the last change that it can see. Invariant: it is
never smaller than before, and greater after each such change, also for a reader that was forgotten and is back.
"""

from __future__ import annotations


class ReaderVersions:
    """`of` a reader, by name; nobody needs to be known beforehand."""

    def __init__(self) -> None:
        self._newest = self._of_all = 1  # of anybody
        self._of: dict[str, int] = {}
        self._concerned: set[str] | None = set()  # readers with news since they were taken; None: all

    def of(self, reader: str) -> int:
        """The newest revision that this reader should have seen."""
        return max(self._of_all, self._of.get(reader, 0))

    def change(self, reader: str) -> None:
        """Something that only this reader sees is different now."""
        self._newest += 1
        self._of[reader] = self._newest
        if self._concerned is not None:
            self._concerned.add(reader)

    def change_all(self) -> None:
        """Something that all see is different now."""
        self._newest += 1
        self._of_all = self._newest
        self._of.clear()
        self._concerned = None

    def concerned(self) -> set[str] | None:
        """Readers that have news since this was asked last; None: all."""
        found, self._concerned = self._concerned, set()
        return found
