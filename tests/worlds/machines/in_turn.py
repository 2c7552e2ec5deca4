"""A route policy that knows no costs, to compare with: SWARM's stochastic wiring alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peerd.messages.handover import Hop
from peerd.pipeline.routes.route_policy import Cut, Options, Sent


class InTurn:
    """Each stage's peer is the next by `StochasticWiring`, wherever it is."""

    def choose(self, now: float, options: Options, cut: Cut) -> list[str]:
        route: list[str] = []
        for names in options:
            free = [name for name in names if not (route and cut(route[-1], name))]
            route.append((free or names)[0])
        return route

    def sent(self, route: Sequence[str]) -> Sent:
        return Sent(route)

    def ended(self, sent: Sent) -> None: ...

    def answered(self, now: float, sent: Sent, hops: Sequence[Hop], took_s: float) -> None: ...

    def update(self, rates: Mapping[str, float]) -> None: ...
