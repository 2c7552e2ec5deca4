"""Rebalancing under preemption: the share of the best possible throughput that rules for moves keep.

Simulates 32 hours of a pipeline whose peers come and go at random, in seeded traces. As in the paper, the rate is the
same for all sizes: 7.5 departures and as many arrivals per hour, one by one, or in bursts of four or ten. Each trace is
run with peers that join a random stage and stay, with SWARM's Algorithm 2 every 300 s and every 60 s, and with peerd's
rule as the conductor applies it at the end of each step, here every STEP_S. Throughput is that of the weakest stage;
the best possible has the same peers divided as evenly as possible at all times. A peer that joins or moves does not
serve for a minute, in which it fetches its stage's state. The queues for Algorithm 2 are those of a pipeline with four
microbatches in flight per peer: stages below capacity have the mean queue of their load, the weakest stages have the
rest, and each peer's queue varies like a Poisson process.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from peerd.swarm.rebalance.loads import PeerLoad, StageLoads, Transfer
from peerd.swarm.rebalance.ordered_moves import OrderedMoves, PostView
from peerd.swarm.rebalance.rebalance_rule import RebalanceConfig
from scripts.benchmarks._queue_rule import QueuedLoad, QueueRule
from scripts.benchmarks._report import Figure, Report

HOUR_S: Final = 3600.0
HOURS: Final = 32
PER_HOUR: Final = 7.5  # departures, and arrivals, of swarms of any size: 60 peers stay eight hours, the mean
MOVE_S: Final = 60.0
STEP_S: Final = 30.0
UNDER_WAY: Final = 4  # microbatches in flight per peer
RULES: Final = ("none", "algorithm2_300", "algorithm2_60", "ours")
PRICES_S: Final = (60, 200, 1000, 1_000_000)  # prices of a move in peerd's rule, to show what fewer moves cost


@dataclass(frozen=True, slots=True)
class Shape:
    """Parameters of a trace."""

    peers: int
    stages: int
    burst: int = 1
    unequal: bool = False

    @property
    def name(self) -> str:
        kind = "steady" if self.burst == 1 else f"bursts of {self.burst}"
        return f"{self.peers} peers, {self.stages} stages, {kind}{', unequal' if self.unequal else ''}"


UNEQUAL: Final = Shape(60, 4, unequal=True)
SHAPES: Final = (
    *(Shape(peers, 4, burst) for peers in (60, 120, 240) for burst in (1, 4, 10)),
    *(Shape(15 * stages, stages) for stages in (8, 16, 32)),
    UNEQUAL,
    Shape(60, 4, 10, unequal=True),
)


@dataclass(frozen=True, slots=True)
class Change:
    """An arrival, or a departure if `speed` is 0. `which`, 0 to 1, selects the departing peer from the list."""

    at: float
    which: float
    speed: float


def trace(shape: Shape, seed: int) -> tuple[list[float], list[Change]]:
    """Speeds of the first peers, and the changes. The number of peers varies around its initial value."""
    rng = random.Random(f"{shape.name} {seed}")
    first = [_speed(rng, shape) for _ in range(shape.peers)]
    changes, now, present = list[Change](), 0.0, shape.peers
    while True:
        coming = PER_HOUR / HOUR_S / shape.burst
        leaving = coming * present / shape.peers
        now += rng.expovariate(leaving + coming)
        if now >= HOURS * HOUR_S:
            return first, changes
        leaves = rng.random() * (leaving + coming) < leaving
        for _ in range(min(shape.burst, present - 1) if leaves else shape.burst):
            changes.append(Change(now, rng.random(), 0.0 if leaves else _speed(rng, shape)))
            present += -1 if leaves else 1


def _speed(rng: random.Random, shape: Shape) -> float:
    return rng.choice((1.0, 2.0, 4.0)) if shape.unequal else 1.0


# --- rules ------------------------------------------------------------------------------------------------------------
class Rule(Protocol):
    """Interface of a rule that decides on moves, and on the stage of newcomers."""

    def due(self, now: float) -> float:
        """Time of the next call of `look`."""
        ...

    def look(self, now: float, loads: Sequence[PeerLoad]) -> list[Transfer]:
        """Moves to start now."""
        ...

    def join(self, loads: Sequence[PeerLoad]) -> int:
        """Stage for a newcomer."""
        ...


class Stays:
    """Rule without moves. Newcomers choose a stage at random."""

    def __init__(self, stages: int, rng: random.Random) -> None:
        self._stages, self._rng = stages, rng

    def due(self, now: float) -> float:
        return float("inf")

    def look(self, now: float, loads: Sequence[PeerLoad]) -> list[Transfer]:
        return []

    def join(self, loads: Sequence[PeerLoad]) -> int:
        return self._rng.randrange(self._stages)


class Ordered:
    """peerd's rule, as the conductor applies it."""

    def __init__(self, config: RebalanceConfig) -> None:
        self._moves, self._work = OrderedMoves(config), config.work
        self._next = 0.0  # end of the first step after a change

    def due(self, now: float) -> float:
        """End of the next step at which something may have changed."""
        return self._next

    def look(self, now: float, loads: Sequence[PeerLoad]) -> list[Transfer]:
        if now % STEP_S:  # a change during a step
            self._next = min(self._next, (now // STEP_S + 1) * STEP_S)
            return []
        self._next = now + 10 * STEP_S  # pauses between moves may have ended
        posts = [PostView(one.peer, one.stage, not one.stays, one.rate) for one in loads]
        moves = self._moves.look(now, posts, STEP_S)
        if (due := self._moves.due(now)) < self._next:
            self._next = max(1.0, -(-due // STEP_S) - now // STEP_S) * STEP_S + now
        return moves

    def join(self, loads: Sequence[PeerLoad]) -> int:
        return StageLoads(loads, self._work).weakest()


def rule_of(name: str, stages: int, rng: random.Random) -> Rule:
    if name == "none":
        return Stays(stages, rng)
    if name == "ours":
        return Ordered(RebalanceConfig((1.0,) * stages))
    if name.startswith("price_"):
        return Ordered(RebalanceConfig((1.0,) * stages, price_s=float(name.removeprefix("price_"))))
    return QueueRule(stages, float(name.rpartition("_")[2]))


# --- the simulation ---------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Seat:
    """A peer's stage and speed, and from when on it serves."""

    stage: int
    speed: float
    serves_at: float = 0.0
    came_at: float = 0.0  # time from which the best possible division includes it


@dataclass(slots=True)
class Outcome:
    """Work done and best possible work, by hour, and the number of moves."""

    done: list[float] = field(default_factory=lambda: [0.0] * HOURS)
    best: list[float] = field(default_factory=lambda: [0.0] * HOURS)
    moves: int = 0

    def percent(self, hours: slice) -> float:
        return 100.0 * sum(self.done[hours]) / sum(self.best[hours])


class Simulation:
    """Simulation of one trace with one rule."""

    def __init__(self, shape: Shape, seed: int, rule: str) -> None:
        self._stages, self._wants_queues = shape.stages, rule.startswith("algorithm2")
        first, self._changes = trace(shape, seed)
        self._rng = random.Random(f"queues {seed}")
        self._rule = rule_of(rule, shape.stages, random.Random(f"joins {seed}"))
        self._seats = {f"p{i:05d}": Seat(0, speed) for i, speed in enumerate(first)}
        for name, stage in divided([(name, seat.speed) for name, seat in self._seats.items()], shape.stages).items():
            self._seats[name].stage = stage
        self._joined = len(first)
        self.outcome = Outcome()

    def run(self) -> Outcome:
        now = 0.0
        for at in self._moments():
            self._pass(now, at)
            now = at
            while self._changes and self._changes[0].at <= now:
                self._change(now, self._changes.pop(0))
            for one in self._rule.look(now, self._loads(now)):
                seat = self._seats[one.peer]
                seat.stage, seat.serves_at = one.target, now + MOVE_S
                self.outcome.moves += 1
        return self.outcome

    def _moments(self) -> Iterator[float]:
        """Times at which something may change."""
        now, end = 0.0, HOURS * HOUR_S
        while now < end:
            due = [self._rule.due(now), *(seat.serves_at for seat in self._seats.values() if seat.serves_at > now)]
            now = min([end, *due, *(change.at for change in self._changes[:1])])
            yield now

    def _change(self, now: float, change: Change) -> None:
        if change.speed:
            stage = self._rule.join(self._loads(now))
            self._seats[f"p{self._joined:05d}"] = Seat(stage, change.speed, now + MOVE_S, now + MOVE_S)
            self._joined += 1
        else:
            names = sorted(self._seats)
            del self._seats[names[int(change.which * len(names))]]

    def _pass(self, now: float, until: float) -> None:
        """Add the work from `now` to `until`, between which nothing changes."""
        capacity = [0.0] * self._stages
        for seat in self._seats.values():
            capacity[seat.stage] += seat.speed * (seat.serves_at <= now)
        best = best_throughput([seat.speed for seat in self._seats.values() if seat.came_at <= now], self._stages)
        while now < until:
            hour = int(now // HOUR_S)
            part_s = min(until, (hour + 1) * HOUR_S) - now
            self.outcome.done[hour] += part_s * min(capacity)
            self.outcome.best[hour] += part_s * best
            now += part_s

    def _loads(self, now: float) -> list[PeerLoad]:
        """The loads for the rule. Only peerd's rule sees peers that are moving, since it has ordered their moves."""
        if not self._wants_queues:
            return [PeerLoad(n, s.stage, s.speed, s.serves_at > now) for n, s in self._seats.items()]
        serving = {name: seat for name, seat in self._seats.items() if seat.serves_at <= now}
        capacity = [1e-9] * self._stages
        for seat in serving.values():
            capacity[seat.stage] += seat.speed
        queues = queues_of(capacity, UNDER_WAY * len(serving))
        return [
            QueuedLoad(n, s.stage, s.speed, queue=_poisson(self._rng, queues[s.stage] * s.speed / capacity[s.stage]))
            for n, s in serving.items()
        ]


def queues_of(capacity: Sequence[float], under_way: float) -> list[float]:
    """Mean number of microbatches that wait in each stage, if `under_way` are in flight in total."""
    through = min(capacity)
    used = [through / each for each in capacity]
    queues = [0.0 if use > 0.999 else min(under_way, use / (1.0 - use)) for use in used]
    full = [stage for stage, use in enumerate(used) if use > 0.999]
    for stage in full:
        queues[stage] = max(0.0, under_way - sum(queues)) / len(full)
    return queues


def _poisson(rng: random.Random, mean: float) -> float:
    return max(0.0, float(round(rng.gauss(mean, mean**0.5))))


def divided(devices: Sequence[tuple[str, float]], stages: int) -> dict[str, int]:
    """Divide devices evenly: each, the fastest first, goes to the stage with the least total speed."""
    heap = [(0.0, stage) for stage in range(stages)]
    found = {}
    for name, speed in sorted(devices, key=lambda one: (-one[1], one[0])):
        has, stage = heapq.heappop(heap)
        found[name] = stage
        heapq.heappush(heap, (has + speed, stage))
    return found


def best_throughput(speeds: Sequence[float], stages: int) -> float:
    """Throughput of the weakest stage with these peers divided evenly, which is optimal for speeds of 1, 2 and 4."""
    heap = [0.0] * stages
    for speed in sorted(speeds, reverse=True):
        heapq.heapreplace(heap, heap[0] + speed)
    return heap[0]


# --- figures ----------------------------------------------------------------------------------------------------------
def measured(shape: Shape, seeds: int, rules: Sequence[str] = RULES) -> dict[str, dict[str, float]]:
    """Means over all seeds, by rule: percent of the best throughput overall, in the first and last hour; and moves."""
    found = {}
    for rule in rules:
        runs = [Simulation(shape, seed, rule).run() for seed in range(seeds)]
        parts = {"percent": slice(None), "first_hour": slice(0, 1), "last_hour": slice(-1, None)}
        found[rule] = {key: sum(run.percent(part) for run in runs) / seeds for key, part in parts.items()}
        found[rule]["moves"] = sum(run.moves for run in runs) / seeds
    return found


def measure(full: bool) -> Report:
    seeds = 10 if full else 3
    sections, traces = [], []
    for number, shape in enumerate(SHAPES):
        found = measured(shape, seeds)
        traces.append({"name": shape.name, **found})
        sections.append([*_figures(number, shape, found)])
        if shape == UNEQUAL:
            sections.append([*_by_price(measured(shape, seeds, [f"price_{price_s}" for price_s in PRICES_S]), found)])
    note = f"{seeds} seeds a trace; lost, moves: over what Algorithm 2 at T = 300 loses and moves; --full: 10 seeds"
    return Report("Rebalancing: percent of the best possible throughput", sections, note, {"traces": traces})


def _lost(ours: dict[str, float], theirs: dict[str, float]) -> float:
    """Ratio of two rules' losses, each relative to the best possible throughput."""
    return (100 - ours["percent"]) / (100 - theirs["percent"])


def _by_price(ours: dict[str, dict[str, float]], found: dict[str, dict[str, float]]) -> Iterator[Figure]:
    """Figures of peerd's rule with higher prices of moves: its loss, and the number of moves."""
    theirs = found["algorithm2_300"]
    for rule, one in ours.items():
        text = f"{UNEQUAL.name}: ours, {rule.removeprefix('price_')} s a move, {one['moves']:.0f} moves: lost, over"
        yield Figure(f"{rule}_lost", f"{text} Algorithm 2", _lost(one, theirs), "", 2)


def _figures(number: int, shape: Shape, found: dict[str, dict[str, float]]) -> Iterator[Figure]:
    for rule in RULES:
        one = found[rule]
        text = f"{shape.name}: {rule}, {one['moves']:.0f} moves"
        yield Figure(f"percent_{number}_{rule}", text, one["percent"], "%", 2)
    ours, theirs = found["ours"], found["algorithm2_300"]
    yield Figure(f"lost_{number}", "  lost, ours over Algorithm 2", _lost(ours, theirs), "", 2, at_most=1 / 3)
    moves = ours["moves"] / max(1.0, theirs["moves"])
    yield Figure(f"moves_{number}", "  moves, ours over Algorithm 2", moves, "", 2, at_most=0.25)
