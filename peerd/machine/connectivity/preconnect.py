"""Connections to stage-mates ahead of a round: which to dial, and when, so that a group stands before it is ordered.

A round begins with everyone's parts on their way to everyone: whoever must be dialled first holds all of them up. So
links are made while the batch fills, in the last seconds before it is due (`forecast`), where they are missing; and at
once while nobody can tell when it is due. Of two peers the one with the smaller id dials, so that two links do not
cross; where that fails, for a peer that can dial but not be dialled, the other does a little later. Sans-IO.
Hostile input: a list of members names up to MAX_MEMBERS peers, some of which nobody can reach: few are dialled at once,
and each again only after a pause that doubles.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

_LEAD_S = 10.0  # before the batch is due: time for a dial that fails, and the other side's turn
_TURN_S = 2.0  # then the other of the two dials
_RETRY_S = 2.0
_RETRY_MOST_S = 30.0
_DIALS = 8  # at once
_SOONEST_S = 0.05  # before the next look: what is left of a wait may be too short for the clock to move


@dataclass(slots=True)
class _Missing:
    """A mate without a link, since its link began to be wanted."""

    next_try: float
    retry_s: float = _RETRY_S
    dialling: bool = False


class PreconnectPlan:
    """One member's view of its stage-mates. `own` and mates are peer ids as text."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._missing: dict[str, _Missing] = {}
        self._wanted = False

    def dial(
        self,
        now: float,
        due_in_s: float | None,
        mates: Collection[str],
        linked: Collection[str],
        *,
        first: bool = False,
    ) -> list[str]:
        """Mates to dial now; each is answered by `ended`. `due_in_s`: until the batch is whole; None: nobody knows.

        `first`: we can not be dialed, so that it is always our turn.
        """
        self._wanted = due_in_s is None or due_in_s <= _LEAD_S
        lacking = sorted(set(mates) - set(linked) - {self._own}) if self._wanted else []
        kept = {mate: known for mate, known in self._missing.items() if known.dialling or mate in lacking}
        fresh = [mate for mate in lacking if mate not in kept]
        self._missing = kept | {mate: _Missing(now if first else now + self._turn_s(mate)) for mate in fresh}
        places = _DIALS - sum(known.dialling for known in self._missing.values())
        ripe = [mate for mate in lacking if not self._missing[mate].dialling and self._missing[mate].next_try <= now]
        for mate in ripe[: max(0, places)]:
            self._missing[mate].dialling = True
        return ripe[: max(0, places)]

    def ended(self, now: float, mate: str) -> None:
        """Note that a dial has ended, well or not: `dial` is told which mates are linked."""
        known = self._missing[mate]
        known.dialling = False
        known.next_try, known.retry_s = now + known.retry_s, min(2 * known.retry_s, _RETRY_MOST_S)

    def wake_in_s(self, now: float, due_in_s: float | None) -> float | None:
        """Seconds until the next call is due if nothing else happens; None: only an event makes one necessary."""
        waits = [max(0.0, known.next_try - now) for known in self._missing.values() if not known.dialling]
        if due_in_s is not None and due_in_s > _LEAD_S:
            waits.append(due_in_s - _LEAD_S)
        return max(_SOONEST_S, min(waits)) if waits else None

    def _turn_s(self, mate: str) -> float:
        return 0.0 if self._own < mate else _TURN_S
