"""The wait for latecomers: members that catch up step by step, and would be one step behind for ever.

A member catches up with the totals of steps that are made. Where the next batch is whole as soon as a step is made, as
in a delayed run that averages for longer than it computes, averaging begins again before any member can have that
step's total, and goes on without it. So the stage waits for those that have come closer since the last step: for as
long as the steps take that they are behind, up to four, and for each at its 1st, 2nd, 4th, 8th .. step, so that one
that never arrives, or only says that it moves, costs a run of n steps log2 n waits. Totals and
reports take round trips, and steps may be shorter than these. Decides only; times are arguments, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.messages.swarm import MAX_MEMBERS, Position
from peerd.machine.swarm.roster import Roster

_FORGIVE_STEPS = 256  # steps after its last wait, a member is waited for as if it were new
_MOST_S = 10.0  # of a wait, however long the steps are
_BEHIND_STEPS = 4  # the most that a wait lasts


@dataclass(slots=True)
class _Waited:
    """The waits for one member: when the last one was, and the pause after it, in steps."""

    step: int
    pause: int = 1


class Latecomers:
    """See the module's header. One conductor's."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._stood: dict[str, int] = {}  # member -> the step that it stood at when the last step was made
        self._waited: dict[str, _Waited] = {}
        self._awaited: dict[str, int] = {}  # member -> its stage
        self._made_at: float | None = None
        self._until = 0.0

    def arrived(self, now: float, current: Position) -> None:
        """A step was made, and led to `current`: choose whom the next one waits for."""
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
        """True while a member of this stage is on its way to the current position, and may still come in time."""
        if now >= self._until:
            self._awaited.clear()
        for peer in [peer for peer, where in self._awaited.items() if where == stage]:
            entry = self._roster.entries.get(peer)
            if entry is None or entry.stage != stage or entry.position == current:
                del self._awaited[peer]
        return stage in self._awaited.values()

    def due(self, now: float) -> float | None:
        """The end of the wait under way; None: nobody is waited for."""
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
