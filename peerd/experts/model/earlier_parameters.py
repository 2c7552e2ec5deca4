"""Era of a microbatch: the parameters of the trunk that all its segments use.

In a synchronous run these are the current parameters, or in a delayed run those of the previous step. With an
asynchronous trunk, parameters change while a microbatch waits for experts, so it uses a snapshot: when a step changes
the parameters, they are copied once for all microbatches that began with them. The copy is freed with the last of
these, or earlier if it is too old to be used or if memory is short.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from peerd.model.stage.microbatch_books import Stale

new_load = itertools.count(1).__next__  # numbers the states that trunks load, uniquely in this process


class TooOld(Stale):
    """The parameters of a microbatch are older than an asynchronous trunk allows, or were freed to save memory."""


class Snapshot:
    """Flat parameters of one step; `flat` is None until a step has changed them, and again once `is_gone`."""

    __slots__ = ("__weakref__", "flat", "is_gone")

    def __init__(self) -> None:
        self.flat: Tensor | None = None
        self.is_gone = False

    def let_go(self) -> None:
        """Free the copy; these parameters can no longer be used."""
        self.flat, self.is_gone = None, True


class EarlierParameters:
    """Snapshots of earlier steps that microbatches still use, oldest first."""

    def __init__(self) -> None:
        self._kept = deque[tuple[int, weakref.ref[Snapshot]]]()

    def __len__(self) -> int:
        """Number of copies in memory."""
        return sum(1 for _, ref in self._kept if (snapshot := ref()) is not None and snapshot.flat is not None)

    def add(self, at: int, snapshot: Snapshot) -> None:
        """Add the snapshot of step `at`, which must be the newest."""
        self._kept.append((at, weakref.ref(snapshot)))

    def let_go_before(self, step: int) -> None:
        """Free the copies of steps before `step`."""
        while self._kept and self._kept[0][0] < step:
            self._pop()

    def let_go_oldest(self) -> bool:
        """Free the oldest copy. Returns False if no copy is left."""
        while self._kept:
            if self._pop():
                return True
        return False

    def _pop(self) -> bool:
        """Remove the oldest snapshot and free its copy. Returns False if no microbatch used it any more."""
        snapshot = self._kept.popleft()[1]()
        if snapshot is None:
            return False
        snapshot.let_go()
        return True

    def clear(self) -> None:
        """Free all copies."""
        while self.let_go_oldest():
            pass


@dataclass(frozen=True, slots=True)
class Era:
    """The parameters of a microbatch: those after `at` global steps. `loads`: number of the state that the trunk had
    loaded.
    """

    at: int
    loads: int
    snapshot: Snapshot | None = field(default=None, compare=False, repr=False)
