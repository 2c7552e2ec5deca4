"""Routes: which peers of a stage a trainer may send its microbatches to, where a plan says who follows whom.

Without a route, `wiring` chooses among all that serve. A fixed route names one peer a stage and no other takes its
place: while that peer is away, the microbatch waits. A plan of the run is a first choice: where a peer's planned
followers cannot be asked, any other peer of the stage is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from peerd.machine.pipeline.route_policy import Cut, Options, RoutePolicy


class Route(Protocol):
    """Policy of a trainer's way through the stages."""

    def allowed(self, stage: int, serving: Collection[str]) -> Collection[str]:
        """Those of the peers that serve `stage` which may take this trainer's microbatches."""
        ...


class FixedRoute:
    """One peer a stage: `first`, then whoever follows it by the table of peer -> next peer."""

    def __init__(self, first: str, follows: Mapping[str, str], stages: int) -> None:
        """ValueError when the table does not lead through all stages, or comes to a peer twice."""
        self.peers = [first]
        for stage in range(1, stages):
            before = self.peers[-1]
            if before not in follows:
                raise ValueError(f"the route ends at {before}, of stage {stage - 1}; the run has {stages} stages")
            self.peers.append(follows[before])
        if len(set(self.peers)) < stages:
            raise ValueError(f"the route from {first} comes to a peer twice: {', '.join(self.peers)}")

    def allowed(self, stage: int, serving: Collection[str]) -> Collection[str]:
        """The route's peer of `stage`, if it serves; else none."""
        return [name for name in serving if name == self.peers[stage]]


class PlannedRoutes:
    """A `RoutePolicy` that has each peer followed by those that a plan names, as far as they may be asked.

    Everything else is another policy's choice.
    """

    def __init__(self, policy: RoutePolicy, follows: Mapping[str, Collection[str]]) -> None:
        """`follows`: peer -> planned peers of the next stage."""
        self._policy, self._follows = policy, follows
        self.sent, self.ended = policy.sent, policy.ended
        self.answered, self.update = policy.answered, policy.update

    def choose(self, now: float, options: Options, cut: Cut) -> list[str]:
        route = self._policy.choose(now, options, cut)
        narrowed: list[Sequence[str]] = list(options)
        for stage in range(1, len(options)):
            before = route[stage - 1]
            narrowed[stage - 1] = [before]
            follows = self._follows.get(before, ())
            planned = [name for name in options[stage] if name in follows and not cut(before, name)]
            if planned and route[stage] not in planned:
                narrowed[stage] = planned
                route = self._policy.choose(now, narrowed, cut)
        return route
