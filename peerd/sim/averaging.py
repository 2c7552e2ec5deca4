"""Moshpit averaging under churn, on one heap of events: the daemon's machines, with vectors that are really summed.

Each round the grid says who meets; every group has a conductor, which does not fail; messages take random times; peers
vanish in the middle, in silence or seen by the conductor, and are back for a later round with what they last committed.
Nothing outlives its round: what is on its way at the deadline is void. Same seed, same trace. Not here: bandwidth,
codes, liars, the election of a conductor. Times are virtual seconds, sums float64 in the order of the group.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from peerd.sim.averaging_conductor import RoundTimes
from peerd.sim.averaging_grid import Grid, Meeting, Moshpit, shape_of
from peerd.sim.averaging_group import SimGroup, SimPeer, Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingPlan:
    """What happens. `fail` per peer and round, at an instant within the first `fail_within_s`."""

    peers: int = 16
    axes: int = 2
    rounds: int = 200
    elements: int = 32
    fail: float = 0.1
    fail_within_s: float = 0.4  # a round without failures takes about as long
    told: float = 0.5  # of those that vanish, how many the conductor sees vanish; the others fall silent
    back: float = 1.0  # probability that a peer that is away is back in the next round
    delay_s: tuple[float, float] = (0.02, 0.1)  # of a message, one way: least and most
    times: RoundTimes = field(default_factory=lambda: RoundTimes(deadline_s=3.0, patience_s=0.5, answer_s=0.3))
    noise: float = 0.0  # standard deviation of what every peer adds to its value before each round
    anew: bool = False  # a new grid for every round, used along one axis: random groups


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round. `spread_*`: variance of the values across all peers, mean over elements."""

    seconds: float
    spread_before: float
    spread_after: float
    lost: tuple[str, ...]  # vanished before they had decided
    kept: tuple[str, ...]  # living, and in some cell ended with their own values
    attempts: int  # of the group that needed most
    groups: tuple[tuple[str, ...], ...]  # who committed together
    explained: Vector  # what commits that counted a lost peer added to the sum of all pairs


class AveragingSim:
    """`values` (peers x elements) and `weights` (peers) to begin with; standard normal and 1 when not given."""

    def __init__(
        self, seed: int | str, plan: AveragingPlan, values: Vector | None = None, weights: Vector | None = None
    ) -> None:
        self.plan = plan
        self.now = 0.0
        self.reports: list[RoundReport] = []
        self._seed = f"{seed}/averaging"
        self._rng = random.Random(self._seed)
        self._draw = np.random.default_rng(self._rng.randrange(1 << 63))
        given = self._draw.standard_normal((plan.peers, plan.elements)) if values is None else values
        scale = np.ones(plan.peers) if weights is None else weights
        pairs = np.hstack([given * scale[:, None], scale[:, None]])
        self.peers = {f"p{i:03}": SimPeer(f"p{i:03}", {(): pair}) for i, pair in enumerate(pairs)}
        self.added = np.zeros(plan.elements + 1)  # to the sum of all pairs, by noise
        self._moshpit = Moshpit(self._seed.encode())
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.groups: list[SimGroup] = []  # of the newest round
        self._lost: set[str] = set()
        self._trace = hashlib.blake2b(digest_size=16)

    def run(self) -> list[RoundReport]:
        """All rounds of the plan; returns their reports."""
        while len(self.reports) < self.plan.rounds:
            self.step()
        return self.reports

    @property
    def values(self) -> Vector:
        """Of all peers, peers x elements, in the order of their names."""
        pairs = np.stack([peer.pair for peer in self.peers.values()])
        return np.asarray(pairs[:, :-1] / pairs[:, -1:])

    @property
    def total(self) -> Vector:
        """The sum of all pairs, which averaging leaves as it is."""
        return np.asarray(np.sum([peer.pair for peer in self.peers.values()], axis=0))

    def spread(self) -> float:
        """See RoundReport."""
        return float(self.values.var(axis=0).mean())

    def trace_hash(self) -> str:
        """32 hex digits over all that was decided so far."""
        return self._trace.hexdigest()

    def step(self) -> RoundReport:
        """One round: from its beginning until everyone who is still there has decided, or the deadline."""
        for peer in self.peers.values():
            peer.up = peer.up or self._rng.random() < self.plan.back
        self._add_noise()
        before, begun = self.spread(), self.now
        self._heap.clear()
        self._lost = set()
        meeting = self._meet()
        if meeting.fresh:
            self._settle(meeting.grid)
        self.groups = [SimGroup(self, line, self.peers, self.plan.times) for line in meeting.lines]
        for group in self.groups:
            group.begin()
        self._plan_failures()
        self.at(begun + self.plan.times.deadline_s, self._deadline)
        while self._heap and not all(group.over for group in self.groups):
            self.now, _, action = heapq.heappop(self._heap)
            action()
        report = self._report(begun, before)
        self.reports.append(report)
        return report

    # --- a round's frame ---------------------------------------------------------------------------------------

    def _add_noise(self) -> None:
        if not self.plan.noise:
            return
        for peer in self.peers.values():
            cell = min(peer.cells)
            more = np.zeros(self.plan.elements + 1)
            more[:-1] = peer.pair[-1] * self._draw.normal(0, self.plan.noise, self.plan.elements)
            peer.cells[cell] = peer.cells[cell] + more
            self.added += more

    def _meet(self) -> Meeting:
        living = [name for name, peer in self.peers.items() if peer.up]
        if not self.plan.anew:
            return self._moshpit.advance(living, self.plan.axes)
        seed = f"{self._seed}/{len(self.reports)}".encode()
        grid = Grid(seed, living, shape_of(len(living), self.plan.axes))
        return Meeting(grid, 0, True, tuple(grid.lines(0, living)))

    def _settle(self, grid: Grid) -> None:
        """A cycle begins: each peer of the grid puts all that it holds into its own cell."""
        for name in grid.home:
            home, *others = grid.cells_of(name)
            pair = self.peers[name].pair
            self.peers[name].cells = {home: pair, **{cell: np.zeros_like(pair) for cell in others}}

    def _plan_failures(self) -> None:
        for name, peer in self.peers.items():
            fails, at, told = self._rng.random(), self._rng.random(), self._rng.random()
            if peer.up and fails < self.plan.fail:
                when = self.now + at * self.plan.fail_within_s
                self.at(when, partial(self._vanish, name, told < self.plan.told))

    def _vanish(self, name: str, seen: bool) -> None:
        self.peers[name].up = False
        for group in self.groups:
            if group.vanished(name, seen):
                self._lost.add(name)

    def _deadline(self) -> None:
        for group in self.groups:
            group.deadline()

    def _report(self, begun: float, before: float) -> RoundReport:
        explained = np.zeros(self.plan.elements + 1)
        kept: set[str] = set()
        for group in self.groups:
            explained += group.explained()
            kept |= {name for name in group.line.peers if self.peers[name].up and not group.decided[name]}
        self.note("lost", *sorted(self._lost))
        return RoundReport(
            self.now - begun,
            before,
            self.spread(),
            tuple(sorted(self._lost)),
            tuple(sorted(kept)),
            1 + max((group.conductor.attempt for group in self.groups), default=0),
            tuple(group.committed for group in self.groups if group.committed),
            explained,
        )

    # --- what groups need --------------------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """See Net."""
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, action))

    def post(self, source: str | None, target: str | None, action: Callable[[], None]) -> None:
        """See Net. Who is away neither sends nor receives."""
        if source is not None and not self.peers[source].up:
            return

        def arrive() -> None:
            if target is None or self.peers[target].up:
                action()

        self.at(self.now + self._rng.uniform(*self.plan.delay_s), arrive)

    def note(self, *what: object) -> None:
        """See Net."""
        self._trace.update(f"{self.now:.9f} {what}\n".encode())
