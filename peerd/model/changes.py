"""Changes of a model's parameters: counts them, and detects one that failed in the middle.

A change that fails in the middle, for example for lack of memory, leaves parameters that are neither the old nor the
new ones. Nothing may be computed with them until a whole state replaces them. Readers that still need the current
parameters are notified before each change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

from peerd.core.errors import PeerdError


class ParametersLost(PeerdError):
    """The parameters belong to no position, because a change of them failed in the middle."""


class ParameterReader(Protocol):
    """A reader that still needs the current parameters."""

    def before_change(self) -> None:
        """Called just before the parameters change."""
        ...


class Changes:
    """Counter of the changes of one model (`begun`), and the readers to notify. For one thread."""

    def __init__(self) -> None:
        self.begun = 0
        self._torn = False
        self._readers = WeakSet[ParameterReader]()

    def announce_to(self, reader: ParameterReader) -> None:
        """Notify `reader` before the next change, if it still exists then."""
        self._readers.add(reader)

    def announce(self) -> None:
        """Notify all readers that the parameters are about to change, even if only temporarily."""
        for reader in list(self._readers):
            reader.before_change()
        self._readers.clear()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Context manager for one change of the parameters. If it fails, `need_whole` raises until one succeeds."""
        self.announce()
        self.begun += 1
        self._torn = True
        yield
        self._torn = False

    def need_whole(self) -> None:
        """Raises ParametersLost if the last change of the parameters failed in the middle."""
        if self._torn:
            raise ParametersLost("the parameters were lost in a change that failed")
