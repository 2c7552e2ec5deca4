"""The batch of the step under way and the one after it: what each takes, and what becomes of it when a step is made."""

from __future__ import annotations

import random

import pytest

from peerd.messages.swarm import Done, Mb, Position, Redo
from peerd.swarm.events import (
    ConductorConfig,
    MemberGone,
    MoveEnded,
    Origin,
    Output,
    PrepareEnded,
    SendMove,
    SendPrepare,
    TrainerReport,
)
from peerd.swarm.positions.phases import Phase
from peerd.swarm.steps.conductor import Conductor
from tests.worlds.machines.conducting import hello


class Run:
    """Two members of one stage, each its own trainer as well; two microbatches make a batch."""

    def __init__(self, delayed: bool = True, total_steps: int = 0) -> None:
        config = ConductorConfig(stages=1, microbatches=2, delayed=delayed, total_steps=total_steps, gather_s=1.0)
        self.conductor = Conductor(config, random.Random(1), 0.0)
        self.now = 0.0
        self.orders: list[Output] = []
        for peer in "ab":
            self.tell(hello(peer))
        self.now = 2.0
        self.orders += self.conductor.wake(self.now)

    def tell(self, event: object) -> None:
        self.orders += self.conductor.handle(self.now, event)  # type: ignore[arg-type]
        self.conductor.batches.check()

    def report(
        self, peer: str, open_: tuple[int, ...], done: tuple[int, ...] = (), early: tuple[int, ...] = ()
    ) -> None:
        news = tuple(Done(seq, [peer]) for seq in done)
        self.tell(TrainerReport(peer, self.step, open_, news, early))

    @property
    def step(self) -> int:
        assert self.conductor.current is not None
        return self.conductor.current.step

    def take(self, kind: type) -> list[Output]:
        found = [order for order in self.orders if isinstance(order, kind)]
        self.orders = [order for order in self.orders if not isinstance(order, kind)]
        return found

    def averaged(self) -> list[SendMove]:
        """Everyone who was asked has averaged."""
        for order in self.take(SendPrepare):
            assert isinstance(order, SendPrepare)
            self.tell(PrepareEnded(order.peer, order.attempt, True))
        return self.take(SendMove)  # type: ignore[return-value]

    def places(self, peer: str) -> tuple[list[int], list[int]]:
        return self.conductor.admitted(peer), self.conductor.admitted(peer, early=True)


def closing() -> Run:
    """Both have done one microbatch, the batch is averaged, and each has begun one of the next."""
    run = Run()
    run.report("a", (1,))
    run.report("b", (2,))
    run.report("a", (3,), done=(1,))
    run.report("b", (4,), done=(2,))
    assert run.places("a") == ([1], [3])
    assert run.conductor.phase is Phase.CLOSING
    return run


def test_what_this_step_has_no_room_for_is_begun_for_the_next_one() -> None:
    run = Run()
    run.report("a", (1, 3))
    assert run.places("a") == ([1, 3], [])
    run.report("b", (2, 4, 6))
    assert run.places("b") == ([], [2, 4])
    assert run.conductor.phase is Phase.OPEN


def test_without_delay_nothing_is_begun_for_the_next_one() -> None:
    run = Run(delayed=False)
    run.report("a", (1, 3))
    run.report("b", (2, 4), done=(9,), early=(9,))
    assert run.places("a") == ([1, 3], [])
    assert run.places("b") == ([], [])


def test_early_work_goes_on_while_all_move_and_becomes_the_next_step_s() -> None:
    run = closing()
    moves = run.averaged()
    assert run.conductor.phase is Phase.MOVING
    assert run.conductor.takes(0)
    run.report("a", (5,), done=(3,), early=(3,))
    assert run.places("a") == ([1], [3])  # there is no room for a third step's
    for move in moves:
        run.tell(MoveEnded(move.peer, move.target))
    assert run.step == 1
    assert run.places("a") == ([3], [5])
    assert run.places("b") == ([4], [])
    assert run.conductor.counted("a", 0) == [1]
    run.report("b", (), done=(4,))
    assert run.conductor.phase is Phase.CLOSING


def test_when_the_next_batch_is_full_too_nobody_gets_another_place() -> None:
    run = closing()
    run.report("a", (5, 7), done=(3,), early=(3,))
    run.report("b", (6, 8), done=(4,), early=(4,))
    assert run.conductor.phase is Phase.CLOSING
    assert run.places("a") == ([1], [3])
    assert run.places("b") == ([2], [4])


def test_nothing_is_begun_for_a_step_after_the_last() -> None:
    run = Run(total_steps=1)
    run.report("a", (1, 3))
    run.report("b", (2, 4))
    assert run.places("b") == ([], [])


def test_a_batch_that_lost_a_part_is_repaired_and_early_work_is_kept() -> None:
    run = closing()
    run.report("b", (6,), done=(4,), early=(4,))
    run.tell(MemberGone("a"))
    assert run.conductor.redo("a") == [Redo(1, 0)]
    run.tell(hello("a", held=frozenset(), early=frozenset()))
    assert run.places("b") == ([2], [4])
    run.report("a", (3,), done=(1,), early=(3,))  # it did it again
    moves = run.averaged()
    assert [move.peer for move in moves] == ["a", "b"]


def test_a_member_that_is_lost_takes_its_early_work_with_it() -> None:
    run = closing()
    run.report("a", (), done=(3,), early=(3,))
    run.tell(MemberGone("a"))
    assert Redo(3, 0) in run.conductor.redo("a")


def test_a_microbatch_that_was_begun_for_the_next_step_gets_no_place_in_this_one() -> None:
    run = Run()
    run.report("a", (1, 3), early=(1,))
    assert run.places("a") == ([3], [])
    run.report("b", (2,))
    assert run.places("a") == ([3], [1])
    assert run.places("b") == ([2], [])


@pytest.mark.parametrize("prepared", [False, True])
def test_a_new_conductor_adopts_early_work(prepared: bool) -> None:
    """Of the step after the members', or, when they only have to commit, of the one they get to."""
    target = Position(1, b"x")
    a, b, early_a, early_b = Mb("a", 1), Mb("b", 2), Mb("a", 3), Mb("b", 4)
    run = Run.__new__(Run)
    config = ConductorConfig(stages=1, microbatches=2, delayed=True)
    run.conductor = Conductor(config, random.Random(1), 0.0, Origin(own="a"))
    run.now, run.orders = 0.0, []
    for peer, held, early in (("a", a, early_a), ("b", b, early_b)):
        ready = {"prepared": target, "counted": frozenset({held})} if prepared else {}
        run.tell(hello(peer, held=frozenset({held}), early=frozenset({early}), **ready))
    run.now = 9.0
    run.orders += run.conductor.wake(run.now)
    for move in run.take(SendMove):
        assert isinstance(move, SendMove)
        run.tell(MoveEnded(move.peer, move.target))
    assert run.step == int(prepared)
    assert run.places("a") == (([3], []) if prepared else ([1], [3]))
    assert run.conductor.counted("b", 0) == ([2] if prepared else [])


def test_who_missed_the_average_does_no_early_work_that_counts() -> None:
    run = closing()
    run.tell(hello("late"))
    run.averaged()
    assert [m.peer for m in run.conductor.members() if m.ready] == ["a", "b"]
    run.tell(TrainerReport("b", 0, (), (Done(4, ["late"]),), (4,)))
    assert run.conductor.redo("b") == [Redo(4, 0)]


@pytest.mark.parametrize("early", [False, True])
def test_what_nobody_can_do_again_leaves_its_place_to_others_at_once(early: bool) -> None:
    """After a change of conductors: its trainer began the same samples anew under another number."""
    run = closing() if early else Run()
    seq = 4 if early else 2
    news = (Done(seq, ["late"]),)  # nobody who serves: to be done again
    run.report("b", (seq,))
    run.tell(TrainerReport("b", run.step, (), news, (seq,) if early else ()))
    assert run.conductor.redo("b") == [Redo(seq, 0)]
    run.tell(TrainerReport("a", run.step, (), (), unknown=(seq,)))  # not its own
    assert run.conductor.redo("b") == [Redo(seq, 0)]
    run.tell(TrainerReport("b", run.step, (9,), (), unknown=(seq,)))
    assert run.conductor.redo("b") == []
    assert run.places("b")[early] == [9]


def test_what_is_held_by_a_member_keeps_its_place_whatever_its_trainer_has_forgotten() -> None:
    run = Run()
    run.report("a", (1,))
    run.report("a", (), done=(1,))
    run.tell(TrainerReport("a", 0, (), (), unknown=(1,)))
    assert run.places("a") == ([1], [])


def test_a_trainer_that_waits_is_woken_by_what_it_can_see_and_not_by_what_others_have_done() -> None:
    run = Run()
    run.report("a", (1,))
    seen = run.conductor.version("a")
    run.report("b", (2,))
    run.report("b", (4, 6), done=(2,))
    assert run.places("b") == ([2], [4, 6])
    assert run.conductor.version("a") == seen
    run.report("a", (3,), done=(1,))  # the batch is whole, and the next one full
    run.report("b", (6,))  # 4 is given up, and 3 takes its place
    assert run.places("a") == ([1], [3])
    assert run.conductor.version("a") > seen
