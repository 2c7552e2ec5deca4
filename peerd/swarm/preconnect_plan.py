"""Connections to stage mates ahead of a round: which peers to dial, and when, so that a group is connected in time.

At the start of a round all members send parts to all others, so a connection that must be dialed first delays everyone.
Missing connections are therefore dialed while the batch fills: in the last seconds before it is due (`forecast`), or at
once if that time is unknown. The peer with the smaller id dials, so that two connections do not cross; if that fails,
because the dialer cannot reach the other one, the other peer dials a little later. Sans-IO. Hostile input: a member
list may name up to MAX_MEMBERS peers, some of them unreachable: only a few are dialed at once, and each is retried only
after a pause that doubles.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from peerd.messages.swarm import MAX_MEMBERS
from peerd.wire.rate.suspicion import Suspicion

_LEAD_S = 10.0  # before the batch is due; enough for one failed dial and the other side's turn
_TURN_S = 2.0  # after this time the peer with the larger id dials
_RETRY_S = 2.0
_RETRY_MOST_S = 30.0
_DIALS = 8  # concurrent dials
_SOONEST_S = 0.05  # shortest wait: the rest of a wait may be less than the clock's resolution


class PreconnectPlan:
    """One member's plan of connections to its stage mates. `own` and mates are peer ids as text."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._missing = Suspicion[str](_RETRY_S, _RETRY_MOST_S, MAX_MEMBERS)  # mates without a wanted connection
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
        self._missing.keep_only({*lacking} | self._missing.probed())
        for mate in lacking:
            if mate not in self._missing:
                self._missing.put_aside(mate, now if first else now + self._turn_s(mate))
        return self._missing.due(now, _DIALS)

    def ended(self, now: float, mate: str) -> None:
        """Record that a dial has ended, successful or not; the next call of `dial` passes the connected mates."""
        self._missing.failed(now, mate)

    def wake_in_s(self, now: float, due_in_s: float | None) -> float | None:
        """Seconds until the next call is due if nothing else happens, or None if only an event can require one."""
        wait_s = self._missing.wakes_at() - now
        if due_in_s is not None and due_in_s > _LEAD_S:
            wait_s = min(wait_s, due_in_s - _LEAD_S)
        return max(_SOONEST_S, wait_s) if wait_s < math.inf else None

    def _turn_s(self, mate: str) -> float:
        return 0.0 if self._own < mate else _TURN_S
