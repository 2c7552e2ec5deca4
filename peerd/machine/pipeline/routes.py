"""Routes: which peers of a stage a trainer may send its microbatches to, if a plan determines the followers of peers.

Without a route, `wiring` chooses among all serving peers. A fixed route has one peer per stage without alternatives:
while that peer is away, the microbatch waits. A run's plan is a preference: if a peer's planned followers cannot be
asked, any other peer of the stage may be used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from peerd.machine.pipeline.route_policy import Cut, Options, RoutePolicy


class Route(Protocol):
    """Policy of a trainer's path through the stages."""

    def allowed(self, stage: int, serving: Collection[str]) -> Collection[str]:
        """The peers among those serving `stage` that may compute this trainer's microbatches."""
        ...


class FixedRoute:
    """One peer per stage: `first`, then the follower of each by a table peer -> next peer."""

    def __init__(self, first: str, follows: Mapping[str, str], stages: int) -> None:
        """Raises ValueError if the table does not lead through all stages, or visits a peer twice."""
        self.peers = [first]
        for stage in range(1, stages):
            before = self.peers[-1]
            if before not in follows:
                raise ValueError(f"the route ends at {before}, of stage {stage - 1}; the run has {stages} stages")
            self.peers.append(follows[before])
        if len(set(self.peers)) < stages:
            raise ValueError(f"the route from {first} visits a peer twice: {', '.join(self.peers)}")

    def allowed(self, stage: int, serving: Collection[str]) -> Collection[str]:
        """The route's peer of `stage` if it serves, else none."""
        return [name for name in serving if name == self.peers[stage]]


class PlannedRoutes:
    """A `RoutePolicy` in which each peer is followed by those of a plan, as far as they may be asked.

    All other decisions are those of another policy.
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
