"""Route policies: the choice of one peer per stage for a microbatch, among those that may be asked now.

A policy chooses a whole route, is informed when a microbatch is sent and when it has returned, and learns from the
answers: `CheapestRoute`, or `PlannedRoutes` in a run with a plan. The caller decides which peers may be asked: it
handles failures, rests and cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from peerd.messages.handover import Hop

Options = Sequence[Sequence[str]]  # by stage: peers that may be asked, in the order of their turns; none is empty
Cut = Callable[[str, str], bool]  # True for two peers that recently could not reach each other


@dataclass(frozen=True, slots=True)
class Sent:
    """A microbatch in flight. `route`: the peers that are to compute it.

    `loads`: number of our microbatches that each had before; `on_ways`: the same for the path from each peer to the
    next.
    """

    route: Sequence[str]
    loads: Sequence[int] = ()
    on_ways: Sequence[int] = ()


class RoutePolicy(Protocol):
    """Chooses a trainer's routes through the stages."""

    def choose(self, now: float, options: Options, cut: Cut) -> list[str]:
        """A peer of each stage. Two that are cut off from each other are chosen only if there is no alternative."""
        ...

    def sent(self, route: Sequence[str]) -> Sent:
        """Record that a microbatch is sent along this route."""
        ...

    def ended(self, sent: Sent) -> None:
        """Record that it has returned or is lost; called exactly once per sent microbatch."""
        ...

    def answered(self, now: float, sent: Sent, hops: Sequence[Hop], took_s: float) -> None:
        """Record that a pass from the first stage on took `took_s`; `hops`: claims of the peers that took part."""
        ...

    def update(self, rates: Mapping[str, float]) -> None:
        """Set the serving peers with their published rates (0 if unknown), and forget all others."""
        ...
