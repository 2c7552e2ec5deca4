"""How many microbatches a trainer keeps under way: on stages of queues and lines, in events of pure time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from peerd.pipeline.routes.in_flight import InFlight
from tests.kit.amount import some

FORWARD, BACKWARD = 1.0, 2.5


@dataclass
class Device:
    """One peer: backwards first, then in order of coming."""

    unit_s: float
    busy: bool = False
    busy_s: float = 0.0
    line: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)


class Pipes:
    """Trainers that send through stages and back; each hop takes half of `rtt_s`."""

    def __init__(self, stages: list[list[float]], rtt_s: float, trainers: int, most: int = 4096) -> None:
        self.stages = [[Device(unit_s) for unit_s in stage] for stage in stages]
        self.rtt_s, self.now = rtt_s, 0.0
        self.flows = [InFlight(most) for _ in range(trainers)]
        self.open = [0] * trainers
        self.done = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._turns = [itertools.cycle(stage) for stage in self.stages]

    def at(self, time: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), what))

    def run(self, until: float) -> None:
        for trainer in range(len(self.flows)):
            self.fill(trainer)
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = until

    def fill(self, trainer: int) -> None:
        while self.open[trainer] < self.flows[trainer].wanted(4):
            self.open[trainer] += 1
            devices, started = [next(turn) for turn in self._turns], self.now
            last = len(devices) - 1
            way = [(device, FORWARD) for device in devices[:-1]]
            way += [(devices[last], FORWARD + BACKWARD)]
            way += [(device, FORWARD + BACKWARD) for device in reversed(devices[:-1])]
            self.hop(trainer, started, way)

    def hop(self, trainer: int, started: float, way: list[tuple[Device, float]]) -> None:
        if not way:
            self.at(self.now + self.rtt_s / 2, lambda: self.back(trainer, started))
            return
        (device, cost), rest = way[0], way[1:]
        urgency = 0.0 if len(way) <= len(self.stages) else 1.0
        self.at(
            self.now + self.rtt_s / 2,
            lambda: self.arrive(device, urgency, cost, lambda: self.hop(trainer, started, rest)),
        )

    def arrive(self, device: Device, urgency: float, cost: float, then: Callable[[], None]) -> None:
        def begin() -> None:
            device.busy = True
            device.busy_s += cost * device.unit_s
            self.at(self.now + cost * device.unit_s, end)

        def end() -> None:
            device.busy = False
            then()
            if device.line:
                heapq.heappop(device.line)[2]()

        if device.busy:
            heapq.heappush(device.line, (urgency, next(self._numbers), begin))
        else:
            begin()

    def back(self, trainer: int, started: float) -> None:
        self.flows[trainer].returned(self.now, self.now - started, self.open[trainer])
        self.open[trainer] -= 1
        self.done += 1
        self.fill(trainer)

    def utilization(self, since: list[list[float]], seconds: float) -> float:
        """Of the slowest stage, since its devices had been busy for so long."""
        shares = [
            sum(device.busy_s - before for device, before in zip(stage, was, strict=True)) / len(stage) / seconds
            for stage, was in zip(self.stages, since, strict=True)
        ]
        return max(shares)


@pytest.mark.parametrize("trainers", [1, 5])
@pytest.mark.parametrize("rtt_s", some([0.0, 0.2, 0.01, 0.1], 2))
@pytest.mark.parametrize(
    "stages",
    [
        [[0.0067], [0.0067], [0.0067]],
        [[0.0067] * 3, [0.0067] * 3, [0.0067] * 3],
        [[0.057], [0.03], [0.057]],
        [[0.01, 0.01], [0.02, 0.02, 0.02, 0.02], [0.01]],
    ],
)
def test_the_slowest_stage_is_busy_and_queues_stay_short(
    stages: list[list[float]], rtt_s: float, trainers: int
) -> None:
    pipes = Pipes(stages, rtt_s, trainers)
    way_s = sum((2 * FORWARD + BACKWARD) * max(stage) + 2 * rtt_s for stage in stages)
    pipes.run(40 * way_s)
    since, done = [[device.busy_s for device in stage] for stage in pipes.stages], pipes.done
    pipes.run(80 * way_s)
    assert pipes.utilization(since, 40 * way_s) >= 0.95
    fills = way_s * (pipes.done - done) / (40 * way_s)  # as many as are under way where nothing queues
    assert sum(pipes.open) <= 8 * fills + 8 * trainers


def test_for_small_layers_at_200_ms_it_is_an_order_more_than_twice_the_peers() -> None:
    """SWARM's `base`: 6.7 ms a layer, forward and backward, 30.5 ms on the line, at 200 ms to and fro."""
    pipes = Pipes([[0.0067 / 3.5]] * 3, 0.2, 1)
    pipes.run(60.0)
    assert 120 <= pipes.open[0] <= 600


def test_no_more_than_a_batch_and_it_says_so() -> None:
    pipes = Pipes([[0.0067]] * 3, 0.2, 1, most=10)
    pipes.run(30.0)
    assert pipes.open[0] == 10
    assert pipes.flows[0].why == "as many as a batch has"


def test_a_batch_without_room_is_no_reason_to_wish_for_more() -> None:
    flow = InFlight(4096)
    assert flow.wanted(16) == 16
    for number in range(1000):
        flow.returned(number * 1.0, 0.5, 3)
    assert flow.wanted(16) == 16
    assert flow.why == "the batch is full"
