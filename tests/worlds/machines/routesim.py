"""Light pipeline in virtual time, for route policies: devices with queues, pairs of peers with delays, no bytes.

A microbatch goes forward through its route and backward again; a device does one thing at a time, backwards first. It
answers with what its peers claim; `lie` changes the claims.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peerd.messages.handover import Hop
from peerd.messages.swarm import Receipt
from peerd.pipeline.routes.route_policy import RoutePolicy, Sent

FORWARD = 1 / 3.5
RECEIPT = Receipt(1, b"")


@dataclass(slots=True)
class _Trip:
    route: list[str]
    under_way: Sent
    sent: float
    at: int = -1
    is_back: bool = False
    arrived: list[float] = field(default_factory=list)
    handed: list[float] = field(default_factory=list)
    onward: list[float] = field(default_factory=list)
    claims: list[Hop] = field(default_factory=list)


class RouteSim:
    """See the module's header. `between_s`: one way, between a peer (or the trainer, "") and the next; `line_s`: beside
    that, for which a tensor has the line from one peer to another to itself.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[str]],
        policy: RoutePolicy,
        computing_s: Callable[[str], float],
        between_s: Callable[[str, str], float],
        lie: Callable[[list[Hop]], list[Hop]] = lambda hops: hops,
        line_s: Callable[[str, str], float] = lambda one, other: 0.0,
    ) -> None:
        self.stages, self.policy, self.lie = [list(names) for names in stages], policy, lie
        self.computing_s, self.between_s, self.line_s = computing_s, between_s, line_s
        self._line_free: dict[tuple[str, str], float] = {}
        self.now, self._rng = 0.0, random.Random(1)
        self.served = Counter[str]()
        self.took: list[float] = []
        self.routes: list[list[str]] = []
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._queues: dict[str, tuple[deque[_Trip], deque[_Trip]]] = {}  # backwards, forwards
        self._busy = set[str]()

    def run(self, microbatches: int, at_once: int) -> float:
        """Do so many, with so many under way; returns the seconds that it took."""
        began, left = self.now, [microbatches]

        def send() -> None:
            if left[0]:
                left[0] -= 1
                self._send(send)

        for _ in range(at_once):
            send()
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self.now - began

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def _send(self, then: Callable[[], None]) -> None:
        for names in self.stages:  # by turns, as wiring has them when all are alike
            names.sort(key=lambda name: (self.served[name], self._rng.random()))
        route = self.policy.choose(self.now, self.stages, lambda one, other: False)
        trip = _Trip(route, self.policy.sent(route), self.now)
        self.served.update(route)
        self.routes.append(route)
        self._at(self.now + self.between_s("", route[0]), lambda: self._arrive(trip, 0, then))

    def _arrive(self, trip: _Trip, at: int, then: Callable[[], None]) -> None:
        trip.at = at
        if not trip.is_back:
            trip.arrived.append(self.now)
        else:
            trip.onward[at] += self.now
        self._queues.setdefault(trip.route[at], (deque(), deque()))[0 if trip.is_back else 1].append(trip)
        self._next(trip.route[at], then)

    def _next(self, name: str, then: Callable[[], None]) -> None:
        backwards, forwards = self._queues[name]
        if name in self._busy or not (backwards or forwards):
            return
        self._busy.add(name)
        trip = (backwards or forwards).popleft()
        is_last = trip.at == len(trip.route) - 1
        share = 1.0 if is_last else 1.0 - FORWARD if trip.is_back else FORWARD
        self._at(self.now + share * self.computing_s(name), lambda: self._done(name, trip, then))

    def _across(self, one: str, other: str) -> float:
        """The time at which a tensor that leaves one peer now is at another one."""
        free = max(self.now, self._line_free.get((one, other), 0.0)) + self.line_s(one, other)
        self._line_free[one, other] = free
        return free + self.between_s(one, other)

    def _done(self, name: str, trip: _Trip, then: Callable[[], None]) -> None:
        self._busy.discard(name)
        at, last = trip.at, len(trip.route) - 1
        if not trip.is_back and at < last:
            trip.onward.append(-self.now)
            self._at(self._across(name, trip.route[at + 1]), lambda: self._arrive(trip, at + 1, then))
        else:
            if at == last:
                trip.onward.append(0.0)
            whole, service_s = self.now - trip.arrived[at], self.computing_s(name)
            wait_s = max(0.0, whole - trip.onward[at] - service_s)
            trip.claims = self.lie([Hop(name, RECEIPT, service_s, wait_s, trip.onward[at]), *trip.claims])
            trip.is_back = True
            before = trip.route[at - 1] if at else ""
            back_at = self._across(name, before) if at else self.now + self.between_s(before, name)
            self._at(back_at, (lambda: self._arrive(trip, at - 1, then)) if at else (lambda: self._end(trip, then)))
        self._next(name, then)

    def _end(self, trip: _Trip, then: Callable[[], None]) -> None:
        self.policy.ended(trip.under_way)
        self.took.append(self.now - trip.sent)
        self.policy.answered(self.now, trip.under_way, trip.claims, self.now - trip.sent)
        then()
