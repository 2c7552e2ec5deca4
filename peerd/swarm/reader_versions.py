"""Version numbers of each reader's view, so that a waiting reader is not woken by changes that concern only others.

One counter numbers all changes; a reader's version is the number of the last change that it can see. Invariant: a
reader's version never decreases, and increases with each such change, even for a reader that was forgotten and returns.
"""

from __future__ import annotations


class ReaderVersions:
    """Versions by reader name. Readers need no registration."""

    def __init__(self) -> None:
        self._newest = self._of_all = 1  # of any reader's last change; of the last change that concerned all
        self._of: dict[str, int] = {}
        self._concerned: set[str] | None = set()  # readers with changes since the last call of `concerned`; all if None

    def of(self, reader: str) -> int:
        """Version of the newest state that this reader should see."""
        return max(self._of_all, self._of.get(reader, 0))

    def change(self, reader: str) -> None:
        """Record a change that only this reader sees."""
        self._newest += 1
        self._of[reader] = self._newest
        if self._concerned is not None:
            self._concerned.add(reader)

    def change_all(self) -> None:
        """Record a change that all readers see."""
        self._newest += 1
        self._of_all = self._newest
        self._of.clear()
        self._concerned = None

    def concerned(self) -> set[str] | None:
        """Readers whose view has changed since the last call, or None for all readers."""
        found, self._concerned = self._concerned, set()
        return found
