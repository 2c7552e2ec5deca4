"""Phases of a run under one conductor, with the members' position and the one that they move to.

    GATHERING -> MOVING                     to the newest position that every stage can reach
    OPEN -> CLOSING -> MOVING -> OPEN       a step: the batch is filled, averaged, committed
    CLOSING -> OPEN                         the batch is not complete any more
    MOVING -> COMPLETE                      the last step is made
    OPEN, MOVING, COMPLETE -> GATHERING     only what members report is certain

`RunPhase` has the phase, its positions, and the members that are moving. Invariant (`check`): a phase follows another
only as in `NEXT`; CLOSING and MOVING have a target; only a move has movers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Final

from peerd.messages.swarm import Position


class Phase(Enum):
    GATHERING = auto()
    OPEN = auto()
    CLOSING = auto()
    MOVING = auto()
    COMPLETE = auto()


NEXT: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.GATHERING: frozenset({Phase.MOVING}),
    Phase.OPEN: frozenset({Phase.CLOSING, Phase.GATHERING}),
    Phase.CLOSING: frozenset({Phase.OPEN, Phase.MOVING}),
    Phase.MOVING: frozenset({Phase.OPEN, Phase.COMPLETE, Phase.GATHERING}),
    Phase.COMPLETE: frozenset({Phase.GATHERING}),
}


class RunPhase:
    """Phase and positions of a run. `delayed`: the next batch is filled during a step."""

    def __init__(self, *, delayed: bool = False) -> None:
        self._delayed = delayed
        self.phase = Phase.GATHERING
        self.current: Position | None = None  # that all members last had, or None if not known yet
        self.target: Position | None = None  # destination of a close or a move
        self.commits = False  # True while the move is a step
        self.ordered: Position | None = None  # destination of this conductor's last step
        self.moving: set[str] = set()  # members that have not arrived yet
        self.steps_made = 0  # under this conductor

    # --- transitions ------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Ask members for their positions again. The target of a move under way is kept: some may have reached it."""
        self.moving.clear()
        self.commits = False
        self._enter(Phase.GATHERING)

    def close(self, lineage: bytes) -> None:
        """Close the batch, which is complete. Its step leads to a position with this lineage."""
        self.target = Position(self.step + 1, lineage)
        self._enter(Phase.CLOSING)

    def reopen(self) -> None:
        """Open the batch again, since it is not complete any more."""
        self.target = None
        self._enter(Phase.OPEN)

    def move(self, target: Position, movers: Iterable[str], *, commits: bool) -> None:
        """Move these members to `target`. `commits`: True if they make the step that was closed, False if they load a
        state.
        """
        self.target, self.moving, self.commits = target, set(movers), commits
        self.ordered = target if commits else self.ordered
        self._enter(Phase.MOVING)

    def arrive(self, total_steps: int) -> None:
        """End a move: the target is reached. The run is complete at `total_steps` (0: never)."""
        assert self.target is not None
        self.current, self.target = self.target, None
        self.steps_made += self.commits
        self.commits = False
        self._enter(Phase.COMPLETE if total_steps and self.current.step >= total_steps else Phase.OPEN)

    def _enter(self, phase: Phase) -> None:
        assert phase in NEXT[self.phase], (self.phase, phase)
        self.phase = phase

    # --- views ------------------------------------------------------------------------------------------------

    @property
    def has_stepped(self) -> bool:
        """True if a step was made under this conductor."""
        return self.steps_made > 0

    @property
    def step(self) -> int:
        """Number of the current step, or 0 while it is unknown."""
        return self.current.step if self.current is not None else 0

    @property
    def settled(self) -> Position | None:
        """Position that every member should have, or None while members gather or move."""
        return self.current if self.phase in (Phase.OPEN, Phase.CLOSING, Phase.COMPLETE) else None

    @property
    def works(self) -> bool:
        """True while the conductor accepts reports on microbatches."""
        return self.phase in (Phase.OPEN, Phase.CLOSING) or (self._delayed and self.commits)

    def serves(self, peer: str, position: Position) -> bool:
        """True if a member at `position` can accept microbatches of this step, or of the next one."""
        if self.current is None:
            return False
        if self.commits:  # a member that missed the average fetches the next state, and loses its microbatches
            return peer in self.moving or position == self.target
        return position == self.current

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        assert self.target is not None or self.phase not in (Phase.CLOSING, Phase.MOVING)
        assert self.phase is Phase.MOVING or not (self.moving or self.commits)
