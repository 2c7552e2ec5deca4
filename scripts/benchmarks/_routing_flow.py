"""GWTF's routes (arXiv 2509.21221) as a policy of the routing benchmark: a min-cost flow found by local exchanges.

The flow has a chain of peers for each microbatch of a step. The cost between neighbours i, j of a chain is d_ij =
(c_i + c_j)/2 + (latency_ij + latency_ji)/2 + 2 size/(rate_ij + rate_ji). A peer is in at most as many chains as its
capacity, which is proportional to its speed. Two chains exchange their tails, or a chain moves to a peer with free
capacity, if that costs less or, with some probability, slightly more (annealing), until nothing improves. The policy
gets exact costs from the simulation, whereas GWTF's peers measure them. The flow is solved again when peers change.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from peerd.messages.handover import Hop
from peerd.pipeline.routes.route_policy import Cut, Options, Sent

SWEEPS: Final = 60
HOTTEST: Final = 0.1  # temperature of the first sweep, over the mean cost of a chain's link
COOLER: Final = 0.9  # factor of the temperature per sweep
ROOM: Final = 1.1  # capacity of a stage, relative to the need of a step

Cost = Callable[[str, str], float]  # d_ij in seconds


class FlowRoutes:
    """Route policy that follows a min-cost flow for the `microbatches` of a step. `speed_of` gives a peer's speed."""

    def __init__(self, microbatches: int, cost: Cost, speed_of: Callable[[str], float], seed: int) -> None:
        self._microbatches, self._cost, self._speed_of = microbatches, cost, speed_of
        self._rng = random.Random(f"flow {seed}")
        self._stages: list[tuple[str, ...]] = []
        self._chains: list[list[str]] = []
        self._free: dict[int, None] = {}  # chains without a microbatch
        self._on: dict[tuple[str, ...], list[int]] = {}  # route -> chains in use with this route

    # --- the flow -----------------------------------------------------------------------------------------------------

    def _solve(self, stages: Sequence[Sequence[str]]) -> None:
        room = [self._capacities(names) for names in stages]
        columns = []
        for capacity in room:
            seats = [name for name, count in capacity.items() for _ in range(count)]
            columns.append(self._rng.sample(seats, self._microbatches))
        self._chains = [list(chain) for chain in zip(*columns, strict=True)]
        used = [Counter(column) for column in columns]
        links = max(1, self._microbatches * (len(stages) - 1))
        mean_s = sum(self._cost(a, b) for chain in self._chains for a, b in pairwise(chain)) / links
        heat = HOTTEST * mean_s
        for _ in range(SWEEPS):
            for at in range(len(self._chains)):
                for stage in range(len(stages)):
                    self._redirect(at, stage, room[stage], used[stage], heat)
                    if stage:
                        self._exchange(at, self._rng.randrange(len(self._chains)), stage, heat)
            heat = heat * COOLER if heat > 1e-3 * mean_s else 0.0

    def _capacities(self, names: Sequence[str]) -> dict[str, int]:
        whole = sum(map(self._speed_of, names))
        return {n: math.ceil(ROOM * self._microbatches * self._speed_of(n) / whole) for n in names}

    def _redirect(self, at: int, stage: int, room: dict[str, int], used: Counter[str], heat: float) -> None:
        """Move a chain to another peer of the stage that has free capacity, if that is accepted."""
        chain = self._chains[at]
        other = self._rng.choice(list(room))
        if used[other] >= room[other]:
            return
        if self._takes(self._around(chain, stage, other) - self._around(chain, stage, chain[stage]), heat):
            used[chain[stage]] -= 1
            used[other] += 1
            chain[stage] = other

    def _exchange(self, one: int, other: int, stage: int, heat: float) -> None:
        """Exchange the tails of two chains from `stage` on, if that is accepted."""
        a, b = self._chains[one], self._chains[other]
        now_s = self._cost(a[stage - 1], a[stage]) + self._cost(b[stage - 1], b[stage])
        then_s = self._cost(a[stage - 1], b[stage]) + self._cost(b[stage - 1], a[stage])
        if self._takes(then_s - now_s, heat):
            a[stage:], b[stage:] = b[stage:], a[stage:]

    def _around(self, chain: Sequence[str], stage: int, name: str) -> float:
        before = self._cost(chain[stage - 1], name) if stage else 0.0
        after = self._cost(name, chain[stage + 1]) if stage + 1 < len(chain) else 0.0
        return before + after

    def _takes(self, more_s: float, heat: float) -> bool:
        return more_s < 0.0 or (heat > 0.0 and self._rng.random() < math.exp(-more_s / heat))

    # --- as a policy --------------------------------------------------------------------------------------------------

    def choose(self, now: float, options: Options, cut: Cut) -> list[str]:
        """The next free chain of the flow, else a random one. If a stage has only one option, the nearest peers."""
        if all(len(names) > 1 for names in options):
            stages = [tuple(sorted(names)) for names in options]
            if stages != self._stages:
                self._stages = stages
                self._solve(stages)
                self._free, self._on = dict.fromkeys(range(len(self._chains))), {}
            at = next(iter(self._free), None)
            at = self._rng.randrange(len(self._chains)) if at is None else at
            self._free.pop(at, None)
            self._on.setdefault(tuple(self._chains[at]), []).append(at)
            return list(self._chains[at])
        route: list[str] = []
        for names in options:
            route.append(min(names, key=lambda name: self._cost(route[-1], name) if route else 0.0))
        return route

    def sent(self, route: Sequence[str]) -> Sent:
        return Sent(route)

    def ended(self, sent: Sent) -> None:
        if chains := self._on.get(tuple(sent.route)):
            self._free[chains.pop()] = None

    def answered(self, now: float, sent: Sent, hops: Sequence[Hop], took_s: float) -> None: ...

    def update(self, rates: Mapping[str, float]) -> None: ...
