"""A batch is filled and done as long as any trainer can do it, whatever the others claim, promise or leave undone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from peerd.messages.swarm import Done
from peerd.swarm.batch.batches import Batches, StageView
from peerd.swarm.events import TrainerReport
from peerd.swarm.reader_versions import ReaderVersions

LEASE_S = (30.0, 120.0)
VIEW = StageView(lambda peer, stage: peer == "member", [False])
TICK_S = 0.1


@dataclass
class Trainer:
    """One that wishes for `ahead` microbatches at a time and does one in `turn_s`."""

    name: str
    turn_s: float
    ahead: int = 2
    bound: bool = False  # what it wishes for was begun for the next step
    hangs: bool = False  # it finishes nothing
    swaps_s: float = 0.0  # it gives up what it has, and wishes for another, so often
    retracts_s: float = 0.0  # it says so often that what it did is at nobody
    next: int = 0
    begun: dict[int, float] = field(default_factory=dict)
    at: float = 0.0  # when it swapped, or retracted, last
    did: list[int] = field(default_factory=list)


class Scene:
    """One batch at a time of `capacity`."""

    def __init__(self, capacity: int, own_pace: bool) -> None:
        self.batches, self.now, self.step = Batches(1, capacity, ReaderVersions(), own_pace), 0.0, 0

    def make_step(self, trainers: Iterable[Trainer], within_s: float = 60.0) -> float:
        """Let these go on until the batch is done; returns its seconds."""
        began, trainers = self.now, list(trainers)
        while not self.batches.due.complete([False]):
            assert self.now - began < within_s, f"the batch is stuck: {self.batches.due.entries}"
            self._tick(trainers)
        self.batches.step_made(self.step)
        self.step += 1
        for one in trainers:
            one.begun, one.did = {}, []
        return self.now - began

    def _tick(self, trainers: list[Trainer]) -> None:
        batches, now = self.batches, self.now
        for one in trainers:
            self._report(one)
        batches.trainers.look_for_waits(now, batches.due)
        batches.drop_dead(now, [False], LEASE_S)
        batches.fill(now, self.step, early=False)
        self.now += TICK_S

    def _report(self, one: Trainer) -> None:
        batches, now = self.batches, self.now
        has = batches.due.by_trainer.get(one.name, {})
        for seq in has:
            if seq not in one.did:
                one.begun.setdefault(seq, max([now, *one.begun.values()]) if not one.begun else now)
        done = []
        if one.swaps_s and now - one.at >= one.swaps_s:
            one.begun, one.at, one.next = {}, now, one.next + one.ahead
        elif one.begun and not one.hangs:
            seq, since = next(iter(one.begun.items()))
            if now - max(since, one.at) >= one.turn_s:
                del one.begun[seq]
                one.did.append(seq)
                one.at, one.next, done = now, max(one.next, seq + 1), [Done(seq, ["member"])]
        if one.retracts_s and one.did and now - one.at >= one.retracts_s:
            one.at, done = now, [Done(one.did[-1], ["member"]), Done(one.did[-1], ["nobody"])]
        open_ = tuple(sorted({*one.begun, *range(one.next, one.next + one.ahead)} - {*one.did}))
        bound = open_ if one.bound else ()
        batches.trainers.report(one.name, open_, bound, self.step + 1)
        report = TrainerReport(one.name, self.step, open_, tuple(done), bound)
        batches.take(now, report, VIEW, delayed=False)


def scene_with(own_pace: bool, *helped: Trainer, capacity: int = 8) -> Scene:
    """A run in which these have made a step or two."""
    scene = Scene(capacity, own_pace)
    for _ in range(2):
        scene.make_step(helped)
    return scene


@pytest.mark.parametrize("own_pace", [False, True])
def test_nothing_is_left_to_a_quick_trainer_whose_wishes_are_all_for_another_step(own_pace: bool) -> None:
    quick, slow = Trainer("quick", 0.1), Trainer("slow", 1.0)
    scene = scene_with(own_pace, quick, slow)
    quick.bound = True
    assert scene.make_step([quick, slow]) < 15


@pytest.mark.parametrize("own_pace", [False, True])
def test_a_trainer_that_gives_back_what_it_has_again_and_again_has_its_turn_last(own_pace: bool) -> None:
    swaps, steady = Trainer("a", 0.1), Trainer("b", 1.0)
    scene = scene_with(own_pace, swaps, steady)
    swaps.hangs, swaps.swaps_s = True, 5.0
    assert scene.make_step([swaps, steady]) < 40


@pytest.mark.parametrize("own_pace", [False, True])
def test_a_trainer_that_takes_back_what_it_said_holds_nobody_up(own_pace: bool) -> None:
    liar, honest = Trainer("liar", 0.1), Trainer("honest", 0.2)
    scene = scene_with(own_pace, liar, honest)
    liar.retracts_s = TICK_S / 2
    assert scene.make_step([liar, honest]) < 10


@pytest.mark.parametrize("own_pace", [False, True])
def test_newcomers_that_can_be_given_nothing_keep_no_other_newcomer_out(own_pace: bool) -> None:
    old, honest = Trainer("old", 0.2), Trainer("n", 0.2)
    scene = scene_with(own_pace, old)
    liars = [Trainer(f"h{number}", 0.2, bound=True) for number in range(8)]
    for _ in range(2):
        scene.make_step([old, *liars, honest])
    assert scene.batches.trainers.newcomers.has_helped("n")


@pytest.mark.parametrize("own_pace", [False, True])
def test_a_newcomer_that_left_its_part_undone_leaves_it_to_another_where_the_others_do_nothing(own_pace: bool) -> None:
    old, idle = Trainer("old", 0.2), Trainer("old", 0.2, ahead=0)
    honest, hangs = Trainer("n", 0.2), Trainer("m", 0.2, ahead=1, hangs=True)
    scene = scene_with(own_pace, old)
    hangs.swaps_s = 3.0
    assert scene.make_step([idle, honest, hangs], within_s=150) < 150


@pytest.mark.parametrize("own_pace", [False, True])
def test_a_slow_newcomer_is_not_measured_by_those_that_do_nothing(own_pace: bool) -> None:
    old, idle, slow = Trainer("old", 0.4), Trainer("old", 0.4, ahead=0), Trainer("n", 10.0)
    scene = scene_with(own_pace, old)
    assert scene.make_step([idle, slow], within_s=200) < 110


@pytest.mark.parametrize("own_pace", [False, True])
def test_a_trainer_that_sits_out_is_back_at_once_where_nobody_else_does_anything(own_pace: bool) -> None:
    old, idle, paused = Trainer("old", 0.2), Trainer("old", 0.2, ahead=0), Trainer("paused", 0.2)
    scene = scene_with(own_pace, old, paused)
    for _ in range(3):
        scene.batches.strike(scene.now, "paused")
    scene.batches.trainers.report("stranger", ())  # one that wishes for nothing
    assert scene.make_step([idle, paused]) < 10


def test_a_quick_trainer_that_hangs_does_not_keep_the_last_place_from_a_slow_one() -> None:
    quick, slow = Trainer("quick", 0.1, ahead=1), Trainer("slow", 10.0)
    scene = scene_with(True, slow, capacity=2)
    scene.make_step([quick, slow])
    quick.hangs = True
    assert scene.make_step([quick, slow], within_s=200) < 100
