"""Route policies: the choice of one peer a stage for a microbatch, among those that may be asked now.

A policy is asked for a whole route, is told when a microbatch leaves and when it has come back, and learns from what
the answers say. Which peers may be asked is not its business: failures, rests and cuts are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from peerd.core.messages.handover import Hop

Options = Sequence[Sequence[str]]  # by stage: peers that may be asked, in the order of their turns; none is empty
Cut = Callable[[str, str], bool]  # True for two peers that found no way to each other lately


@dataclass(frozen=True, slots=True)
class Sent:
    """A microbatch under way. `route`: the peers that are to compute it; `loads`: what each had before, of ours;
    `on_ways`: the same on the way from each to the next."""

    route: Sequence[str]
    loads: Sequence[int] = ()
    on_ways: Sequence[int] = ()


class RoutePolicy(Protocol):
    """The choice of a trainer's ways through the stages."""

    def choose(self, now: float, options: Options, cut: Cut) -> list[str]:
        """A peer of each stage; two that are cut off from each other only where nobody else is left."""
        ...

    def sent(self, route: Sequence[str]) -> Sent:
        """A microbatch leaves that these peers are to compute."""
        ...

    def ended(self, sent: Sent) -> None:
        """It has come back, or is lost: exactly once for each that was sent."""
        ...

    def answered(self, now: float, sent: Sent, hops: Sequence[Hop], took_s: float) -> None:
        """A way from the first stage on was answered after so long; `hops`: claims of the peers that took part."""
        ...

    def update(self, rates: Mapping[str, float]) -> None:
        """These serve, each at its published rate, 0: unknown; forget all others."""
        ...


class InTurn:
    """SWARM's stochastic wiring alone: each stage's peer is the next by `StochasticWiring`, wherever it is."""

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
