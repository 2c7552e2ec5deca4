"""Divergence of a run: no microbatch of a step has a finite gradient any more, whichever trainer tries.

A single bad sample is dropped and replaced. Where several were dropped at a position, by every trainer that is at
work, and none was finished, the parameters are the cause: the position is barred, and the swarm goes back to the newest
one before it that every stage can reach. Once: if that happens again soon, it would happen again and again, so the run
stops and says why, until another peer joins: those that were there may have been wrong. Counts only. Hostile input:
trainers' reports; as long as one trainer finishes anything, those of all others change nothing.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from peerd.core.messages.swarm import Position
from peerd.machine.batch.ledger import Ledger

DROPPED: Final = 8  # microbatches at one position, without one that is finite
AGAIN_STEPS: Final = 100  # after a return, a run that has diverged again by then has not got past the cause


class Divergence:
    """What one conductor knows of it. `barred`: positions that are not gone to; `stopped`: why no step is made."""

    def __init__(self) -> None:
        self.barred: set[Position] = set()
        self.stopped = ""
        self._dropped: dict[str, int] = {}  # by trainer, at this position
        self._returned_at: int | None = None  # the step of the last return

    def dropped(self, trainer: str, count: int) -> None:
        """The trainer has dropped so many microbatches of the step under way, which are not finite."""
        if count:
            self._dropped[trainer] = self._dropped.get(trainer, 0) + count

    def member_came(self) -> None:
        """Another peer serves: a run that was stopped for what its peers said tries again."""
        self.stopped = ""

    def arrived(self) -> None:
        """The swarm has another position: nothing was dropped there."""
        self._dropped.clear()

    def has_come(self, due: Ledger, trainers: Set[str]) -> bool:
        """True when nothing of the batch is finite: no microbatch was finished, and all trainers have dropped some.

        `trainers`: those at work, whether they have begun anything or not. A quick one does not speak for the others.
        """
        finished = due.undone < len(due.entries)
        enough = sum(self._dropped.get(trainer, 0) for trainer in trainers) >= DROPPED
        everybody = due.by_trainer.keys() | trainers <= self._dropped.keys()
        return enough and not finished and not self.stopped and everybody

    def judge(self, current: Position) -> str:
        """Bar the swarm's position, or stop; returns the warning."""
        self.arrived()
        told = f"the run has diverged: no microbatch of step {current.step} has a finite gradient"
        if self._returned_at is not None and current.step <= self._returned_at + AGAIN_STEPS:
            self.stopped = f"{told}, again; lower optimizer.lr, or set optimizer.clip_norm, and start anew"
            return self.stopped
        self.barred.add(current)
        self._returned_at = current.step
        return f"{told}: the swarm goes back to its newest checkpoint, once"
