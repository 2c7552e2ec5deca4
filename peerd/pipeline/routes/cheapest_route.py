"""Routes by flow, sans-IO: each microbatch takes the path through all stages that costs least now, including load.

The flow of all microbatches should be spread so that no peer is a bottleneck, and should have the least cost: seconds
of computing, and between peers. This is a min-cost flow, as in GWTF (arXiv 2509.21221), here solved one microbatch at a
time. A peer's price is the computing that our microbatches in flight there still need, so shares follow speeds, and
among peers with equal prices nearby ones are chosen. Tensors of several microbatches on the path between the same two
peers also wait for each other. Routes are compared as a whole: a peer that is slow to reach from one side may be the
best one from the other. The trainer itself counts what is in flight, so a peer that does not return microbatches gets
no more of them, regardless of its claims (`hop_costs`).

For a stage with many peers only a sample is compared: those next in turn, and some at random.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, TypeVar

from peerd.messages.handover import Hop
from peerd.pipeline.routes.hop_costs import TRAINER, HopCosts
from peerd.pipeline.routes.route_policy import Cut, Options, Sent

T = TypeVar("T")

_COMPARED: Final = 16  # peers of a stage that are compared
_IN_TURN: Final = 4  # of these, the ones next in turn
# Fraction of each microbatch in flight that one more has to wait for; most are partly done. With a full count the
# last microbatches of a step would make long detours around peers that will be free in time; with less than half, a
# peer that was once measured at a few times its mate's seconds would get nothing.
_STILL_TO_COMPUTE: Final = 0.5
_STILL_ON_THE_LINE: Final = 0.25  # one of two directions, half of it done
_CUT_S: Final = 1e9  # added for two peers that cannot reach each other


class CheapestRoute:
    """Route policy by least cost. `rng`: draws the samples, and the initial coordinates of peers."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._costs = HopCosts(rng)
        self._rates: Mapping[str, float] = {}  # as published
        self._under_way = Counter[str]()
        self._between = Counter[tuple[str, str]]()  # the same, by pair of successive peers
        self._serving: frozenset[str] | None = None  # None: not known yet

    def choose(self, now: float, options: Options, cut: Cut) -> list[str]:
        """The route of least cost, see `RoutePolicy`; of equal ones the one whose peers are next in turn."""
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
            doubted_s = self._costs.doubted_s(name, now)  # try a newcomer, but do not flood it
            each_s = _STILL_TO_COMPUTE * service_s if doubted_s is None else min(doubted_s, slowest_s)
            prices.append(service_s + each_s * self._under_way[name] + self._costs.waiting_s(name, now))
        return prices

    def _ways_s(self, one: str, others: Sequence[str], now: float) -> list[float]:
        """Seconds from a peer to each of `others` and back, including the microbatches that are between the two."""
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
            return  # a peer has left meanwhile, or never existed
        loads = dict(zip(sent.route, sent.loads, strict=True))
        most = [loads.get(hop.peer, 0) + self._under_way[hop.peer] for hop in hops]
        if len(sent.route) == len(hops):
            # Mean number of others on each line, between when this microbatch was sent and now.
            others = zip(pairwise(sent.route), sent.on_ways, strict=True)
            slowed = [1.0, *(_times_as_long((before + self._between[way] - 1) / 2) for way, before in others)]
            self._costs.answered(now, hops, took_s, most, sent.route, slowed)
        else:
            self._costs.answered(now, hops, took_s, most)

    def update(self, rates: Mapping[str, float]) -> None:
        self._rates, serving = rates, frozenset(rates)
        if self._serving is None or not self._serving <= serving:  # peers have left: rare, but checks all pairs
            self._costs.keep_only(serving)
        self._serving = serving


def _times_as_long(others: float) -> float:
    """Factor by which other microbatches on the same path lengthen the time between two peers."""
    return 1.0 + _STILL_ON_THE_LINE * max(0.0, others)


def _take(counter: Counter[T], keys: Iterable[T]) -> None:
    """Decrement the count of each of `keys`, and drop those that reach zero."""
    for key in keys:
        counter[key] -= 1
        if counter[key] <= 0:
            del counter[key]


def _back(stages: Sequence[Sequence[str]], totals: Sequence[float], ways: Sequence[Sequence[int]]) -> list[str]:
    """The route with the least total cost; `ways`: for each peer, the index of the best peer before it."""
    at = min(range(len(totals)), key=totals.__getitem__)
    route = []
    for names, came in zip(reversed(stages), reversed(ways), strict=True):
        route.append(names[at])
        at = came[at]
    return route[::-1]
