"""Steps and newcomers that take places in the batch: what those who do nothing cost, and what slow ones are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from peerd.messages.swarm import Done
from peerd.swarm.batch.batches import Batches, StageView
from peerd.swarm.batch.probation import Probation
from peerd.swarm.events import TrainerReport
from peerd.swarm.reader_versions import ReaderVersions

VIEW = StageView(lambda peer, stage: True, [False])
LEASE_S = (30.0, 120.0)
BATCH = 8
TRAINERS = ("a@home", "b@home")
TURN_S = 0.5  # of an honest trainer's microbatch, from admission to its end, unless a test says otherwise


class Run:
    """A batch at a time: two trainers that finish what they have within `turn_s`, and newcomers.

    `newcomers`: yields the names of those that wish for microbatches from the next step on; `pace_s`: how long these
    take for one.
    """

    def __init__(self, newcomers: Iterator[list[str]], pace_s: Callable[[str], float], turn_s: float = TURN_S) -> None:
        self.batches, self.now, self.steps = Batches(1, BATCH, ReaderVersions(), own_pace=False), 0.0, 0
        self.batches.trainers.newcomers.probation = Probation(lambda peer: peer.rpartition("@")[2])
        self._newcomers, self._pace_s, self._turn_s = newcomers, pace_s, turn_s
        self._here: list[str] = []
        self._step([])  # in which the two show that they can

    def seconds(self, steps: int) -> float:
        """Make so many steps; returns their seconds."""
        return sum(self._step(next(self._newcomers)) for _ in range(steps))

    def _step(self, newcomers: list[str]) -> float:
        began, trainers = self.now, self.batches.trainers
        for name in set(self._here) - set(newcomers):
            trainers.gone(name)
        self._here = newcomers
        for name in newcomers:
            trainers.report(name, tuple(range(64)))
        while not self.batches.due.complete([False]):
            self._tick()
            assert self.now - began < 2000 * self._turn_s, "the step never ends"
        self.batches.step_made(self.steps)
        trainers.newcomers.probation.step_made()
        self.steps += 1
        return self.now - began

    def _tick(self) -> None:
        batches, trainers = self.batches, self.batches.trainers
        for name in TRAINERS:
            trainers.report(name, tuple(range(100 * self.steps, 100 * self.steps + 64)))
        trainers.look_for_waits(self.now, batches.due)
        batches.drop_dead(self.now, [False], LEASE_S)
        batches.fill(self.now, self.steps, early=False)
        self.now += self._turn_s / 5
        for name, open_ in list(batches.due.open.items()):
            pace_s = self._turn_s if name in TRAINERS else self._pace_s(name)
            done = [Done(seq, ["p"]) for seq, entry in open_.items() if self.now - entry.since >= pace_s]
            batches.take(self.now, TrainerReport(name, self.steps, tuple(open_), tuple(done)), VIEW, delayed=False)


def nobody() -> Iterator[list[str]]:
    """No newcomers."""
    while True:
        yield []


def fresh(each: int, places: int) -> Iterator[list[str]]:
    """So many new identities each step, at so many places in turn."""
    for first in count(0, each):
        yield [f"{number}@{number % places}" for number in range(first, first + each)]


def with_one(name: str, others: Iterator[list[str]]) -> Iterator[list[str]]:
    """`name` in each step, after others."""
    for names in others:
        yield [*names, name]


@pytest.mark.parametrize(("each", "places"), [(1, 1), (5, 5), (40, 5), (40, 1000)])
def test_trainers_that_take_places_and_do_nothing_cost_a_run_a_fifth_at_most(each: int, places: int) -> None:
    calm, attacked = Run(nobody(), lambda name: 0.0), Run(fresh(each, places), lambda name: 1e9)
    share = calm.seconds(600) / attacked.seconds(600)
    print(f"steps a second beside those without newcomers: {share:.2f}")
    assert share >= 0.8


def test_a_newcomer_as_quick_as_the_others_helps_although_liars_use_up_all_waits() -> None:
    run = Run(with_one("honest@there", fresh(40, 1000)), lambda name: TURN_S if name == "honest@there" else 1e9)
    run.seconds(100)
    assert run.batches.trainers.newcomers.has_helped("honest@there")


@pytest.mark.parametrize("turn_s", [TURN_S, 120.0])
def test_a_newcomer_that_is_ten_times_as_slow_helps_in_time_where_nobody_lies(turn_s: float) -> None:
    run = Run(with_one("slow@there", nobody()), lambda name: 10 * turn_s, turn_s)
    run.seconds(400)
    assert run.batches.trainers.newcomers.has_helped("slow@there")
