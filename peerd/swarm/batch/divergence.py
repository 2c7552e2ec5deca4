"""Divergence of a run: no microbatch of a step has a finite gradient any more, whichever trainer computes it.

A single bad sample is dropped and replaced. If several were dropped at a position, some by every trainer at work, and
none was finished, the parameters are the cause: the position is barred, and the swarm goes back to the newest earlier
position that every stage can reach. It does so once. If the run diverges again soon, it would do so again and again, so
it stops and reports why, until another peer joins, because the reports of those present may have been wrong. Counts
only. Hostile input: trainers' reports; as long as one trainer finishes anything, the reports of all others have no
effect.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from peerd.messages.swarm import Position
from peerd.swarm.batch.batch_ledger import BatchLedger

DROPPED: Final = 8  # microbatches dropped at one position while none was finished
AGAIN_STEPS: Final = 100  # if a run diverges again within this many steps of its return, it has not got past the cause


class Divergence:
    """Detects that the run diverges (no finite gradients), and has it go back once, or stop.

    `barred`: positions not to return to. `stopped`: why the run has stopped, or "".
    """

    def __init__(self) -> None:
        self.barred: set[Position] = set()
        self.stopped = ""
        self._dropped: dict[str, int] = {}  # by trainer, at this position
        self._returned_at: int | None = None  # the step of the last return

    def dropped(self, trainer: str, count: int) -> None:
        """Record that the trainer dropped `count` microbatches of the current step because they are not finite."""
        if count:
            self._dropped[trainer] = self._dropped.get(trainer, 0) + count

    def member_came(self) -> None:
        """Let a stopped run try again, since another peer has joined and earlier reports may have been wrong."""
        self.stopped = ""

    def arrived(self) -> None:
        """Record that the swarm has another position, at which nothing was dropped yet."""
        self._dropped.clear()

    def has_come(self, due: BatchLedger, trainers: Set[str]) -> bool:
        """True if the run has diverged: no microbatch was finished, and all trainers have dropped some.

        `trainers`: those at work, even if they have begun nothing, so that a quick one does not decide for the others.
        """
        finished = due.undone < len(due.entries)
        enough = sum(self._dropped.get(trainer, 0) for trainer in trainers) >= DROPPED
        everybody = due.by_trainer.keys() | trainers <= self._dropped.keys()
        return enough and not finished and not self.stopped and everybody

    def judge(self, current: Position) -> str:
        """Return a warning, and bar the position at which the run diverged, or stop the run.

        The run is stopped if it diverges again within AGAIN_STEPS steps of its last return.
        """
        self.arrived()
        told = f"the run has diverged: no microbatch of step {current.step} has a finite gradient"
        if self._returned_at is not None and current.step <= self._returned_at + AGAIN_STEPS:
            self.stopped = f"{told}, again; lower optimizer.lr, or set optimizer.clip_norm, and start the run again"
            return self.stopped
        self.barred.add(current)
        self._returned_at = current.step
        return f"{told}: the swarm goes back to its newest checkpoint, once"
