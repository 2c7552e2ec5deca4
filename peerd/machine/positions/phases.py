"""The phases of a run under one conductor, and its course: the members' position, and the one they move to.

    GATHERING -> MOVING                     the newest position that every stage can reach
    OPEN -> CLOSING -> MOVING -> OPEN       a step: the batch is filled, averaged, committed
    CLOSING -> OPEN                         the batch is not whole any more
    MOVING -> COMPLETE                      the last step is made
    any -> GATHERING                        nothing is certain but what members say

`RunPhase` holds the phase and the positions that belong to it, and of members only those under way. Invariant
(`check`): a phase follows another only as in `NEXT`; CLOSING and MOVING have a target; only a move has movers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Final

from peerd.core.messages.swarm import Position


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
    """Phase and positions of a run; see the module's header. `delayed`: the next batch is filled during a step."""

    def __init__(self, *, delayed: bool = False) -> None:
        self._delayed = delayed
        self.phase = Phase.GATHERING
        self.current: Position | None = None  # that all members had last; None: this conductor does not know yet
        self.target: Position | None = None  # where a close or a move leads
        self.commits = False  # True while the move is a step
        self.ordered: Position | None = None  # where the last step of this conductor led
        self.moving: set[str] = set()  # members that have not yet arrived
        self.steps_made = 0  # in this conductor's reign

    # --- transitions ------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Ask members for their positions again. The target of a move under way stays: some may have reached it."""
        self.moving.clear()
        self.commits = False
        self._enter(Phase.GATHERING)

    def close(self, lineage: bytes) -> None:
        """The batch is whole: the step that it makes leads to a position with this lineage."""
        self.target = Position(self.step + 1, lineage)
        self._enter(Phase.CLOSING)

    def reopen(self) -> None:
        """The batch is not whole any more."""
        self.target = None
        self._enter(Phase.OPEN)

    def move(self, target: Position, movers: Iterable[str], *, commits: bool) -> None:
        """These members go to `target`; `commits`: by the step that was closed."""
        self.target, self.moving, self.commits = target, set(movers), commits
        self.ordered = target if commits else self.ordered
        self._enter(Phase.MOVING)

    def arrive(self, total_steps: int) -> None:
        """End of a move: the target is reached, where the run may end (`total_steps`; 0: never)."""
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
        """True when a step was made in this conductor's reign."""
        return self.steps_made > 0

    @property
    def step(self) -> int:
        """The step under way; 0 while nothing is known."""
        return self.current.step if self.current is not None else 0

    @property
    def settled(self) -> Position | None:
        """The position that every member should have; None while members are on their way."""
        return self.current if self.phase in (Phase.OPEN, Phase.CLOSING, Phase.COMPLETE) else None

    @property
    def works(self) -> bool:
        """True while microbatches count."""
        return self.phase in (Phase.OPEN, Phase.CLOSING) or (self._delayed and self.commits)

    def serves(self, peer: str, position: Position) -> bool:
        """True when a member at `position` can take microbatches of this step, or of the next one."""
        if self.current is None:
            return False
        if self.commits:  # a member that was not in time for the average fetches the next state, and forgets
            return peer in self.moving or position == self.target
        return position == self.current

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert self.target is not None or self.phase not in (Phase.CLOSING, Phase.MOVING)
        assert self.phase is Phase.MOVING or not (self.moving or self.commits)
