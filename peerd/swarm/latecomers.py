"""Wait for latecomers: members that catch up step by step, and would otherwise stay one step behind for ever.

A member catches up with the totals of completed steps. If the next batch is complete as soon as a step is made, as in a
delayed run that averages for longer than it computes, averaging begins again before any member can have that step's
total, and goes on without the latecomers. So a stage waits for members that have come closer since the last step. A
wait lasts as many step times as the member is behind, at most four, because totals and reports need round trips, which
may take longer than a step. A member is waited for at its 1st, 2nd, 4th, 8th .. step, so that one that never arrives,
or only claims to move, costs a run of n steps log2 n waits. Decides only; times are arguments, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from peerd.core.bounded_dict import BoundedDict
from peerd.messages.swarm import MAX_MEMBERS, Position
from peerd.swarm.roster import Roster

_FORGIVE_STEPS = 256  # steps after a member's last wait until it counts as new again
_MOST_S = 10.0  # longest wait, however long the steps are
_BEHIND_STEPS = 4  # longest wait, in step times

_LEAST_S = 2.0
_FACTOR = 3.0


@dataclass(slots=True)
class _Waited:
    """Waits for one member: the step of the last one, and the pause after it, in steps."""

    step: int
    pause: int = 1


class Latecomers:
    """Decides which latecomers one conductor's steps wait for."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._stood: dict[str, int] = {}  # member -> its step when the last step was made
        self._waited: dict[str, _Waited] = {}
        self._awaited: dict[str, int] = {}  # member -> its stage
        self._made_at: float | None = None
        self._until = 0.0

    def arrived(self, now: float, current: Position) -> None:
        """Record a step that led to `current`, and choose the members that the next one waits for."""
        step_s = min(now - self._made_at, _MOST_S) if self._made_at is not None else 0.0
        self._made_at = now
        behind = {peer: entry for peer, entry in self._roster.entries.items() if entry.position.step < current.step}
        self._awaited = {
            peer: entry.stage
            for peer, entry in behind.items()
            if entry.position.step > self._stood.get(peer, entry.position.step) and self._may_wait(peer, current.step)
        }
        behind_steps = max((current.step - behind[peer].position.step for peer in self._awaited), default=0)
        self._until = now + min(step_s * min(behind_steps, _BEHIND_STEPS), _MOST_S)
        self._stood = {peer: entry.position.step for peer, entry in self._roster.entries.items()}

    def awaits(self, now: float, stage: int, current: Position | None) -> bool:
        """True while a member of this stage is on its way to the current position and may still arrive in time."""
        if now >= self._until:
            self._awaited.clear()
        for peer in [peer for peer, where in self._awaited.items() if where == stage]:
            entry = self._roster.entries.get(peer)
            if entry is None or entry.stage != stage or entry.position == current:
                del self._awaited[peer]
        return stage in self._awaited.values()

    def due(self, now: float) -> float | None:
        """End of the present wait, or None if no member is waited for."""
        return self._until if self._awaited and now < self._until else None

    def _may_wait(self, peer: str, step: int) -> bool:
        last = self._waited.get(peer)
        if last is None or step >= last.step + _FORGIVE_STEPS:
            self._waited.pop(peer, None)
            if len(self._waited) >= MAX_MEMBERS:
                del self._waited[next(iter(self._waited))]
            self._waited[peer] = _Waited(step)
            return True
        if step < last.step + last.pause:
            return False
        last.step, last.pause = step, min(2 * last.pause, _FORGIVE_STEPS // 2)
        return True


class LateMovers:
    """Deadline for members that do not confirm a step which others have made, derived from measured times.

    A commit is an optimizer step. Once each stage has a member that made it, and half of all members have, the others
    may take three times as long as that half took, or three times as long as they took themselves before. Members that
    are later are dropped: the others go on, and a late member catches up when it reports again. Decides only; times are
    arguments, in seconds.

    Hostile input: a member that confirms the step at once shortens the wait for others, but to no less than `_LEAST_S`.
    """

    def __init__(self) -> None:
        self._took_s = BoundedDict[str, float](MAX_MEMBERS)  # member -> seconds from its last order to its answer
        self._began, self._most = 0.0, 0.0
        self._stages: dict[str, int] = {}  # mover -> its stage
        self._arrived: set[str] = set()
        self._lacking: set[int] = set()  # stages of which no member has arrived

    def begin(self, now: float, movers: Iterable[tuple[str, int]]) -> None:
        """Start the wait for these members, each given with its stage, which are ordered to make the step."""
        self._stages = dict(movers)
        self._began, self._most, self._arrived = now, math.inf, set()
        self._lacking = set(self._stages.values())

    def arrived(self, now: float, mover: str) -> None:
        """Record that a member has made the step."""
        if mover not in self._stages:
            return
        took_s = now - self._began
        self._took_s[mover] = took_s
        self._arrived.add(mover)
        self._lacking.discard(self._stages[mover])
        if self._most == math.inf and not self._lacking and 2 * len(self._arrived) >= len(self._stages):
            self._most = max(_LEAST_S, _FACTOR * took_s)

    def late(self, now: float, moving: Iterable[str]) -> list[str]:
        """The members among `moving` that are too late, sorted."""
        return sorted(mover for mover in moving if mover in self._stages and now >= self._until(mover))

    def due(self, moving: Iterable[str]) -> float:
        """Time at which the next of the `moving` members is too late, or infinity if there is none."""
        return min((self._until(mover) for mover in moving if mover in self._stages), default=math.inf)

    def _until(self, mover: str) -> float:
        return self._began + max(self._most, _FACTOR * self._took_s.get(mover, 0.0))
