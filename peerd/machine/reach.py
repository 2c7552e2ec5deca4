"""Which position a swarm can go on from: what each member holds, has prepared or has saved, taken together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from peerd.core.training import Mb, Position

START = Position(0, b"")  # where every peer begins: parameters are a pure function of the run's seed


@dataclass(slots=True)
class Member:
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


def best_position(stages: int, members: Collection[Member], first_save: int, announced: int) -> Position | None:
    """The newest position that every stage can reach; None when there is none.

    Everyone can make the parameters of step 0 again. But back to them from a step that somebody may have saved
    (`first_save` or later) would throw work away that returns with a peer. `announced`: the newest step that
    anyone, also somebody out of reach, has said to be at, or to keep the checkpoints of.
    """
    reach: list[set[Position]] = [set() for _ in range(stages)]
    holders: Counter[Position] = Counter()
    for member in members:
        reach[member.stage] |= {member.position, *member.saved, *([member.prepared] if member.prepared else [])}
        holders[member.position] += 1
    common = set.intersection(*reach) - {START}
    newest = max((p.step for member in members for p in (member.position, *member.saved)), default=0)
    if all(reach) and max(newest, announced) < first_save:
        common.add(START)
    return max(common, key=lambda p: (p.step, holders[p], p.lineage), default=None)
