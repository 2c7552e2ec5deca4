"""Routes by flow, sans-IO: each microbatch takes the way through all stages that costs least now, loads included.

The flow of all microbatches is to be spread so that no peer is a bottleneck, and to cost as little as can be: seconds
of computing, and between peers. That is a min-cost flow, as in GWTF (arXiv 2509.21221), here found one microbatch after
the other: a peer's price is the computing that our microbatches under way there have still to get, so shares follow
speeds, and among peers with equal prices those are taken that are near each other. Tensors of several microbatches on
the line between the same two peers wait for each other as well. Routes are compared as a whole: a peer that is slow to
reach from one side may be the best one from the other. What is under way the trainer counts itself, so a peer that does
not give back what it was given gets no more, whatever it claims (`hop_costs`).

Of a stage with many peers a sample is compared: those whose turn it is, and some at random.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeVar

from peerd.core.messages.handover import Hop
from peerd.machine.pipeline.hop_costs import TRAINER, HopCosts
from peerd.machine.pipeline.route_policy import Cut, Options, Sent

T = TypeVar("T")

_COMPARED: Final = 16  # peers of a stage
_IN_TURN: Final = 4  # of these, by whose turn it is
# Of each microbatch under way, the part that one more has to wait for: most are ahead, and partly done. A full count
# would send the last ones of a step a long way round to avoid peers that are free when they come; less than half of one
# would give nothing to a peer that was once measured at a few times its mate's seconds.
_STILL_TO_COMPUTE: Final = 0.5
_STILL_ON_THE_LINE: Final = 0.25  # one direction of two, and half of that is over
_CUT_S: Final = 1e9  # in place of the time between two peers that found no way to each other


class RouteFlow:
    """See the module's header. `rng`: draws the samples, and the first places of peers in space."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._costs = HopCosts(rng)
        self._rates: Mapping[str, float] = {}  # as published
        self._under_way = Counter[str]()
        self._between = Counter[tuple[str, str]]()  # the same, on the ways from one peer to the next
        self._serving: frozenset[str] | None = None  # None: not told yet

    def choose(self, now: float, options: Options, cut: Cut) -> list[str]:
        """See RoutePolicy: the route of least cost; of equal ones by whose turn it is."""
        before, totals, ways = [TRAINER], [0.0], [[-1]]
        stages: list[Sequence[str]] = []
        for names in options:
            names = self._sample(names)
            prices = self._prices(names, now)
            best, came = [float("inf")] * len(names), [-1] * len(names)
            for at, (one, total) in enumerate(zip(before, totals, strict=True)):
                for to, between_s in enumerate(self._ways_s(one, names, now)):
                    cost = total + between_s + prices[to]
                    if cost < best[to]:
                        if cut(one, names[to]):
                            cost += _CUT_S
                            if cost >= best[to]:
                                continue
                        best[to], came[to] = cost, at
            stages.append(names)
            before, totals = list(names), best
            ways.append(came)
        return _back(stages, totals, ways[1:])

    def _sample(self, names: Sequence[str]) -> Sequence[str]:
        if len(names) <= _COMPARED:
            return names
        return [*names[:_IN_TURN], *self._rng.sample(names[_IN_TURN:], _COMPARED - _IN_TURN)]

    def _prices(self, names: Sequence[str], now: float) -> list[float]:
        """Seconds until each peer has computed one more microbatch."""
        services = self._costs.services(names, now, self._rates)
        slowest_s = max(services)
        prices = []
        for name, service_s in zip(names, services, strict=True):
            doubted_s = self._costs.doubted_s(name, now)  # a newcomer is tried, and not flooded
            each_s = _STILL_TO_COMPUTE * service_s if doubted_s is None else min(doubted_s, slowest_s)
            prices.append(service_s + each_s * self._under_way[name] + self._costs.waiting_s(name, now))
        return prices

    def _ways_s(self, one: str, others: Sequence[str], now: float) -> list[float]:
        """Seconds from a peer to each of these, and back, with what is on the line between the two."""
        ways_s = self._costs.between(one, others, now)
        return [
            seconds * _times_as_long(self._between[one, other]) for other, seconds in zip(others, ways_s, strict=True)
        ]

    def sent(self, route: Sequence[str]) -> Sent:
        sent = Sent(route, [self._under_way[name] for name in route], [self._between[way] for way in pairwise(route)])
        self._under_way.update(route)
        self._between.update(pairwise(route))
        return sent

    def ended(self, sent: Sent) -> None:
        _take(self._under_way, sent.route)
        _take(self._between, pairwise(sent.route))

    def answered(self, now: float, sent: Sent, hops: Sequence[Hop], took_s: float) -> None:
        if self._serving is not None and not all(hop.peer in self._serving for hop in hops):
            return  # one has gone meanwhile, or never was
        loads = dict(zip(sent.route, sent.loads, strict=True))
        most = [loads.get(hop.peer, 0) + self._under_way[hop.peer] for hop in hops]
        if len(sent.route) == len(hops):
            # What was on a way when this one left, and what is now: the mean of both, it itself not counted.
            others = zip(pairwise(sent.route), sent.on_ways, strict=True)
            slowed = [1.0, *(_times_as_long((before + self._between[way] - 1) / 2) for way, before in others)]
            self._costs.answered(now, hops, took_s, most, sent.route, slowed)
        else:
            self._costs.answered(now, hops, took_s, most)

    def update(self, rates: Mapping[str, float]) -> None:
        self._rates, serving = rates, frozenset(rates)
        if self._serving is None or not self._serving <= serving:  # some have gone: rare, and a look at all pairs
            self._costs.keep_only(serving)
        self._serving = serving


def _times_as_long(others: float) -> float:
    """The time between two peers, over that without the others that are on the way as well."""
    return 1.0 + _STILL_ON_THE_LINE * max(0.0, others)


def _take(counter: Counter[T], keys: Iterable[T]) -> None:
    """Count each of `keys` once less, and forget those that are at nothing."""
    for key in keys:
        counter[key] -= 1
        if counter[key] <= 0:
            del counter[key]


def _back(stages: Sequence[Sequence[str]], totals: Sequence[float], ways: Sequence[Sequence[int]]) -> list[str]:
    """The route that ends at the least total."""
    at = min(range(len(totals)), key=totals.__getitem__)
    route = []
    for names, came in zip(reversed(stages), reversed(ways), strict=True):
        route.append(names[at])
        at = came[at]
    return route[::-1]
