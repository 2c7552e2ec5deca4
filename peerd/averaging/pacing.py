"""Pacing of each connection in an averaging round, so that the queues of slow internet connections do not overflow.

If twenty TCP connections share an uplink of 20 Mb/s, each has a window of a few packets. They fill its queue in bursts.
A connection that loses its packets there waits for a TCP timeout, and the whole round waits with it. So each connection
is limited to the rate at which all of them end together (`AveragingPlan.pair_bytes_per_s`). The limit stays until the
end of the round, because a connection that finishes early only delays others. Where the system cannot pace, this module
has no effect. Invariant: no connection stays limited after the round. A conductor that states rates that are too low
slows its round down, as it could by a bad division of the vector; the lowest rate is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from peerd.averaging.allreduce_round import AveragingPlan
from peerd.core.ids import PeerId

Pacer = Callable[[PeerId, float], None]  # bytes/s to a peer; inf: no limit

_LEAST_BYTES_PER_S: Final = 20e3  # other calls share the connection


class RoundPacing:
    """Paces the connections of one round."""

    def __init__(self, pacer: Pacer | None, plan: AveragingPlan, own: str) -> None:
        """If `pacer` is None, or the plan states no network rates, no connection is paced."""
        self._pacer = pacer
        self._rates = plan.pair_bytes_per_s(own) if pacer is not None else {}
        self._begun: set[str] = set()

    def begin(self, peer: str) -> None:
        """Begin to pace a new connection to this peer."""
        if peer in self._rates and peer not in self._begun:
            self._begun.add(peer)
            self._set(peer, max(self._rates[peer], _LEAST_BYTES_PER_S))

    def end(self) -> None:
        """Stop pacing: the round is over."""
        for peer in self._begun:
            self._set(peer, math.inf)

    def _set(self, peer: str, bytes_per_s: float) -> None:
        assert self._pacer is not None
        self._pacer(PeerId.parse(peer), bytes_per_s)
