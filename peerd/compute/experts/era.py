"""Era of a microbatch: the parameters of the trunk that all its segments are computed with.

In a synchronous run these are the parameters of now, or in a delayed run of the step before. With an asynchronous trunk
the parameters go on while a microbatch waits for experts, so it holds a snapshot: a copy of the parameters is made when
a step changes them, once for all microbatches that began with them. It is freed with the last of these, or as soon as
none of them could use it any more: when it is too old, or when the memory is needed.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from dataclasses import dataclass, field

from torch import Tensor

from peerd.compute.model.served_stage import Stale

new_load = itertools.count(1).__next__  # a number for each state that a trunk takes; no two trunks share one


class TooOld(Stale):
    """The parameters of a microbatch are further behind than an asynchronous trunk allows, or were let go for want of
    memory.
    """


class Snapshot:
    """Parameters of one step, flat; `flat` is None until a step has changed them, and again once `is_gone`."""

    __slots__ = ("__weakref__", "flat", "is_gone")

    def __init__(self) -> None:
        self.flat: Tensor | None = None
        self.is_gone = False

    def let_go(self) -> None:
        """Free the copy: nobody can compute with these parameters any more."""
        self.flat, self.is_gone = None, True


class EarlierParameters:
    """The snapshots of earlier steps that microbatches still hold, oldest first."""

    def __init__(self) -> None:
        self._kept = deque[tuple[int, weakref.ref[Snapshot]]]()

    def __len__(self) -> int:
        """Copies that are held now."""
        return sum(1 for _, ref in self._kept if (snapshot := ref()) is not None and snapshot.flat is not None)

    def add(self, at: int, snapshot: Snapshot) -> None:
        """Note the snapshot of step `at`, the newest one."""
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
        """Free the first snapshot, and forget it. Returns False if no microbatch held it."""
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
    """The parameters that a microbatch is computed with: those of `at` global steps, since they were loaded last."""

    at: int
    loads: int
    snapshot: Snapshot | None = field(default=None, compare=False, repr=False)
