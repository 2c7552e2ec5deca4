"""A step of which nothing is finite: the conductor sends the members back to an older position, once."""

from __future__ import annotations

import random

import pytest

from peerd.messages.swarm import Done, Position
from peerd.swarm.batch.divergence import AGAIN_STEPS, DROPPED
from peerd.swarm.events import ConductorConfig, MoveEnded, Note, Origin, Output, SendMove, TrainerReport
from peerd.swarm.positions.phases import Phase
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello

BACK, NOW = Position(4, b"back"), Position(6, b"now")


class Run:
    """Two members of one stage with a checkpoint, and trainers "t" and "u"; four microbatches make a batch."""

    def __init__(self) -> None:
        config = ConductorConfig(stages=1, microbatches=4, first_save=2, gather_s=1.0, own_pace=False)
        self.conductor = Conductor(config, random.Random(1), 0.0, Origin(own="a"))
        self.now = 0.0
        self.out: list[Output] = []
        self.dropped = 0
        for peer in "ab":
            self.tell(hello(peer, NOW, saved=(BACK, NOW)))  # it saved the parameters that are no good as well
        self.wait()
        assert self.conductor.current == NOW

    def tell(self, event: object) -> None:
        self.out += self.conductor.handle(self.now, event)  # type: ignore[arg-type]
        self.conductor.batches.check()

    def wait(self) -> None:
        self.now += 2.0
        self.out += self.conductor.wake(self.now)

    def drop(self, trainer: str, count: int) -> None:
        """It begins microbatches, one after the other, and drops each."""
        assert self.conductor.current is not None
        step = self.conductor.current.step
        for _ in range(count):
            self.dropped += 1
            seq = self.dropped
            self.tell(TrainerReport(trainer, step, (seq,), ()))
            self.tell(TrainerReport(trainer, step, (), (), unknown=(seq,)))

    def notes(self) -> list[str]:
        return [order.text for order in self.out if isinstance(order, Note) and order.warning]

    def go(self) -> list[SendMove]:
        """All moves that were ordered, carried out."""
        self.wait()
        moves = [order for order in self.out if isinstance(order, SendMove)]
        self.out.clear()
        for move in moves:
            self.tell(MoveEnded(move.peer, move.target))
        return moves


@pytest.fixture
def run() -> Run:
    return Run()


def test_members_go_back_to_the_newest_position_before_the_one_that_is_no_good(run: Run) -> None:
    run.drop("t", DROPPED - 1)
    assert run.conductor.phase is Phase.OPEN
    run.drop("t", 1)
    assert run.conductor.phase is Phase.GATHERING
    assert any("the run has diverged: no microbatch of step 6" in note for note in run.notes())
    assert run.go() == [SendMove(peer, BACK, commit=False) for peer in "ab"]
    assert run.conductor.current == BACK
    assert run.conductor.phase is Phase.OPEN


def test_as_long_as_somebody_finishes_anything_it_is_the_samples(run: Run) -> None:
    run.tell(TrainerReport("u", 6, (1000,), (Done(1000, ["a"]),)))
    run.drop("t", 3 * DROPPED)
    assert run.conductor.phase is Phase.OPEN
    assert run.notes() == []


def test_a_trainer_that_has_something_under_way_is_waited_for(run: Run) -> None:
    run.tell(TrainerReport("u", 6, (1000,), ()))
    run.drop("t", 3 * DROPPED)
    assert run.conductor.phase is Phase.OPEN, "it may be finite for that one"
    run.tell(TrainerReport("u", 6, (), (), unknown=(1000,)))
    assert run.conductor.phase is Phase.GATHERING


@pytest.mark.parametrize("helped", [True, False])
def test_a_trainer_that_is_quicker_than_the_others_does_not_send_the_run_back(run: Run, helped: bool) -> None:
    """It drops what it begins before the others have begun anything at a new step: they may find it finite."""
    run.tell(TrainerReport("u", 6, (), ()))
    if helped:
        run.conductor.batches.trainers.step_made(["u"])
    run.drop("t", 3 * DROPPED)
    assert run.conductor.phase is Phase.OPEN
    assert run.notes() == []
    run.drop("u", DROPPED)
    assert run.conductor.phase is Phase.GATHERING


def test_what_was_never_admitted_does_not_count(run: Run) -> None:
    for seq in range(3 * DROPPED):
        run.tell(TrainerReport("t", 6, (), (), unknown=(seq,)))
    assert run.conductor.phase is Phase.OPEN


def test_the_second_time_the_run_stops_until_another_peer_joins(run: Run) -> None:
    run.drop("t", DROPPED)
    run.go()
    run.drop("t", DROPPED)
    assert run.conductor.phase is Phase.OPEN
    assert run.conductor.waits_for().startswith(
        "the run has diverged: no microbatch of step 4 has a finite gradient, again"
    )
    run.tell(TrainerReport("t", 4, (2000,), ()))
    assert run.conductor.admitted("t") == []
    run.tell(hello("c", BACK))
    run.tell(TrainerReport("t", 4, (2000,), ()))
    assert run.conductor.admitted("t") == [2000]


def test_much_later_it_goes_back_once_more(run: Run) -> None:
    run.drop("t", DROPPED)
    run.go()
    divergence = run.conductor._divergence
    assert divergence.judge(Position(6 + AGAIN_STEPS + 1, b"later")).endswith(
        "goes back to its newest checkpoint, once"
    )
    assert not divergence.stopped
