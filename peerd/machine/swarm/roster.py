"""Members as a conductor knows them: where each stands, what it holds, and where it could go."""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.messages.swarm import Mb, Position

START = Position(0, b"")  # where every peer begins: parameters are a pure function of the run's seed


@dataclass(slots=True)
class RosterEntry:
    """A stage peer as the conductor knows it."""

    stage: int
    session: int
    position: Position
    prepared: Position | None
    saved: frozenset[Position]
    held: frozenset[Mb]
    counted: frozenset[Mb]
    addrs: tuple[str, ...]
    early: frozenset[Mb] = frozenset()
    since: float = 0.0
    digest: bytes = b""  # of the last mean it has

    @property
    def reach(self) -> set[Position]:
        """Positions where the member says that it stands, or could go."""
        return {self.position, *self.saved, *([self.prepared] if self.prepared else [])}

    @property
    def is_anywhere(self) -> bool:
        """True when it says that it is, or could be, anywhere but at the start."""
        return self.reach != {START}
