"""Pacing of each peer's connection in a round whose lines are known: evenly, so that short queues do not overflow.

Where twenty connections share a line of 20 Mb/s, each has a window of a few packets; they fill the queue of the line in
bursts, and one that loses its packets there waits for a timer of TCP's, and the whole round for it. So each connection
leaves at the rate that it needs for everyone to end together (`AveragingPlan.pair_bytes_per_s`), to the end of the
round: a connection that hurries then only pushes others aside. Nothing here is of use, nor of harm, where the system
cannot pace. Invariant: whoever was held back is let go when the round ends. A conductor that says too low a rate slows
its round down as it could by any other division; the least rate is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from peerd.core.ids import PeerId
from peerd.machine.averaging.allreduce import AveragingPlan

Pacer = Callable[[PeerId, float], None]  # bytes/s to a peer; inf: as fast as the system can

_LEAST_BYTES_PER_S: Final = 20e3  # calls share the connection


class RoundPacing:
    """The connections of one round."""

    def __init__(self, pacer: Pacer | None, plan: AveragingPlan, own: str) -> None:
        """Without a `pacer`, and where the plan says nothing of lines, all of it does nothing."""
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
