"""Connections to stage mates ahead of a round: which peers to dial, and when, so that a group is connected in time.

At the start of a round all members send parts to all others, so a connection that must be dialed first delays everyone.
Missing connections are therefore dialed while the batch fills: in the last seconds before it is due (`forecast`), or at
once if that time is unknown. The peer with the smaller id dials, so that two connections do not cross; if that fails,
because the dialer cannot reach the other one, the other peer dials a little later. Sans-IO. Hostile input: a member
list may name up to MAX_MEMBERS peers, some of them unreachable: only a few are dialed at once, and each is retried only
after a pause that doubles.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

_LEAD_S = 10.0  # before the batch is due; enough for one failed dial and the other side's turn
_TURN_S = 2.0  # after this time the peer with the larger id dials
_RETRY_S = 2.0
_RETRY_MOST_S = 30.0
_DIALS = 8  # concurrent dials
_SOONEST_S = 0.05  # shortest wait: the rest of a wait may be less than the clock's resolution


@dataclass(slots=True)
class _Missing:
    """A mate without a connection, since the connection has been wanted."""

    next_try: float
    retry_s: float = _RETRY_S
    dialling: bool = False


class PreconnectPlan:
    """One member's plan of connections to its stage mates. `own` and mates are peer ids as text."""

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
        """The mates to dial now; report the end of each dial to `ended`.

        `due_in_s`: seconds until the batch is complete, or None if unknown. `first`: nobody can dial us, so we always
        dial.
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
        """Record that a dial has ended, successful or not; the next call of `dial` passes the connected mates."""
        known = self._missing[mate]
        known.dialling = False
        known.next_try, known.retry_s = now + known.retry_s, min(2 * known.retry_s, _RETRY_MOST_S)

    def wake_in_s(self, now: float, due_in_s: float | None) -> float | None:
        """Seconds until the next call is due if nothing else happens, or None if only an event can require one."""
        waits = [max(0.0, known.next_try - now) for known in self._missing.values() if not known.dialling]
        if due_in_s is not None and due_in_s > _LEAD_S:
            waits.append(due_in_s - _LEAD_S)
        return max(_SOONEST_S, min(waits)) if waits else None

    def _turn_s(self, mate: str) -> float:
        return 0.0 if self._own < mate else _TURN_S
