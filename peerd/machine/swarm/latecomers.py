"""Wait for latecomers: members that catch up step by step, and would otherwise stay one step behind for ever.

A member catches up with the totals of completed steps. If the next batch is complete as soon as a step is made, as in a
delayed run that averages for longer than it computes, averaging begins again before any member can have that step's
total, and goes on without the latecomers. So a stage waits for members that have come closer since the last step. A
wait lasts as many step times as the member is behind, at most four, because totals and reports need round trips, which
may take longer than a step. A member is waited for at its 1st, 2nd, 4th, 8th .. step, so that one that never arrives,
or only claims to move, costs a run of n steps log2 n waits. Decides only; times are arguments, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from peerd.core.messages.swarm import MAX_MEMBERS, Position
from peerd.machine.swarm.roster import Roster

_FORGIVE_STEPS = 256  # steps after a member's last wait until it counts as new again
_MOST_S = 10.0  # longest wait, however long the steps are
_BEHIND_STEPS = 4  # longest wait, in step times


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
