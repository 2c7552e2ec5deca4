"""Routes by a run's plan, which determines the followers of peers.

The plan is a preference: if a peer's planned followers cannot be asked, any other peer of the stage may be used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from peerd.pipeline.routes.route_policy import Cut, Options, RoutePolicy


class PlannedRoutes:
    """A `RoutePolicy` in which each peer sends to the next ones that a plan names for it, as far as they may be asked.

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
