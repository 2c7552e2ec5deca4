"""Changes of a model's parameters: how many were begun, and whether the last one came to its end.

A change that fails in the middle, as for want of memory, leaves parameters that are neither the old nor the new ones.
Nothing may be computed with them; only a whole state that takes their place makes them whole again. Readers of the
parameters as they are now are told before they change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakSet

from peerd.core.errors import PeerdError


class ParametersLost(PeerdError):
    """The parameters are neither those of their position nor others: a change of them failed in the middle."""


class ParameterReader(Protocol):
    """Someone who still needs the parameters as they are now."""

    def before_change(self) -> None:
        """The parameters change as soon as this returns."""
        ...


class Changes:
    """See the module's header. For one thread."""

    def __init__(self) -> None:
        self.begun = 0
        self._torn = False
        self._readers = WeakSet[ParameterReader]()

    def announce_to(self, reader: ParameterReader) -> None:
        """Tell `reader` before the next change, if it still exists then."""
        self._readers.add(reader)

    def announce(self) -> None:
        """Tell all readers that the parameters are about to change, if only for a while."""
        for reader in list(self._readers):
            reader.before_change()
        self._readers.clear()

    @contextmanager
    def one(self) -> Iterator[None]:
        """The scope of a change."""
        self.announce()
        self.begun += 1
        self._torn = True
        yield
        self._torn = False

    def need_whole(self) -> None:
        """ParametersLost after a change that failed in the middle."""
        if self._torn:
            raise ParametersLost("the parameters were lost in a change that failed")
