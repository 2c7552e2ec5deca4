"""Whose microbatches fill the batch: each trainer's in turn, but not one that would hold the step up.

Where trainers compute for themselves (a model of one stage) they are as fast as their machines. A step ends when the
last admitted microbatch is done, so near its end a slow trainer gets no further one: it would still compute when the
others have long been able to do it too. In pipelines the stages set the pace, and every wish is taken. Times are
measured here from reports; what a trainer says of its speed counts for nothing. Invariant: the fastest trainer that
wishes and has nothing under way is never passed over, so a batch is filled whoever is slow.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from peerd.core.training import Mb
from peerd.machine.ledger import Ledger

_SMOOTHING = 0.3


@dataclass(slots=True)
class _Trainer:
    open: tuple[int, ...] = ()  # wished for or begun, in its order of preference
    seconds: float = 0.0  # of one microbatch, measured; 0: not yet
    last_done: float = 0.0


class Admission:
    """The trainers of a run and their wishes. `own_pace`: they compute for themselves."""

    def __init__(self, own_pace: bool) -> None:
        self._own_pace = own_pace
        self._trainers: dict[str, _Trainer] = {}

    def __contains__(self, trainer: str) -> bool:
        return trainer in self._trainers

    def first(self) -> str | None:
        """The first trainer by name."""
        return min(self._trainers, default=None)

    def report(self, trainer: str, wishes: tuple[int, ...]) -> None:
        """What the trainer has open now."""
        self._trainers.setdefault(trainer, _Trainer()).open = wishes

    def gone(self, trainer: str) -> None:
        self._trainers.pop(trainer, None)

    def finished(self, now: float, trainer: str, began: float) -> None:
        """The trainer has finished a microbatch that was admitted at `began`."""
        known = self._trainers.get(trainer)
        if known is None:
            return
        took = max(now - max(began, known.last_done), 1e-6)
        known.seconds += (took - known.seconds) * (_SMOOTHING if known.seconds else 1.0)
        known.last_done = now

    def wishes(self, ledger: Ledger, counted: Container[Mb]) -> Iterator[Mb]:
        """Microbatches to admit, while there is room: the caller admits each before it takes the next."""
        # Who was never measured comes first, so that one step tells of them all.
        order = sorted(self._trainers.items(), key=lambda item: (item[1].seconds > 0 and self._own_pace, item[0]))
        turns = ([Mb(name, seq) for seq in t.open] for name, t in order)
        for wishes in zip_longest(*turns):
            for mb in wishes:
                if ledger.full:
                    return
                if mb is None or mb in ledger.entries or mb in counted:
                    continue
                if not self._own_pace or self._in_time(mb.trainer, ledger):
                    yield mb

    def _in_time(self, trainer: str, ledger: Ledger) -> bool:
        """Would the trainer be done with one more when all together are done with the rest?"""
        seconds = self._trainers[trainer].seconds
        active = {name: t.seconds for name, t in self._trainers.items() if t.open and t.seconds}
        if not seconds or not active:
            return True
        begun = ledger.unfinished()
        left = ledger.capacity - len(ledger.entries) + sum(begun.get(name, 0) for name in active)
        together = left / sum(1 / each for each in active.values())
        return (begun.get(trainer, 0) + 1) * seconds <= together + min(active.values())
