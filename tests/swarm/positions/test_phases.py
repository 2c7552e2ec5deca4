"""The course of a run: phases follow each other as the table says, and members serve where the phase lets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from peerd.messages.swarm import Position
from peerd.swarm.positions.phases import NEXT, Phase, RunPhase
from peerd.swarm.roster import START

AHEAD = Position(1, b"lineage ")


def opened(*, delayed: bool = False) -> RunPhase:
    course = RunPhase(delayed=delayed)
    course.move(START, ["a"], commits=False)
    course.moving.discard("a")
    course.arrive(0)
    return course


def stepping(*, delayed: bool = False) -> RunPhase:
    """A member of three has committed, one is on its way, one was not in time for the average."""
    course = opened(delayed=delayed)
    course.close(AHEAD.lineage)
    course.move(AHEAD, ["a", "b"], commits=True)
    course.moving.discard("a")
    return course


def test_a_step_leads_to_the_next_position() -> None:
    course = opened()
    assert (course.phase, course.current, course.settled) == (Phase.OPEN, START, START)
    course = stepping()
    course.check()
    assert (course.phase, course.current, course.target, course.settled) == (Phase.MOVING, START, AHEAD, None)
    assert not course.has_stepped
    course.moving.clear()
    course.arrive(0)
    course.check()
    assert (course.phase, course.current, course.target, course.step) == (Phase.OPEN, AHEAD, None, 1)
    assert course.has_stepped


@pytest.mark.parametrize(("total_steps", "phase"), [(0, Phase.OPEN), (1, Phase.COMPLETE), (2, Phase.OPEN)])
def test_the_last_step_completes_the_run(total_steps: int, phase: Phase) -> None:
    course = stepping()
    course.moving.clear()
    course.arrive(total_steps)
    assert course.phase is phase


def test_during_a_step_those_serve_who_go_along() -> None:
    course = opened()
    assert course.serves("c", START)
    course = stepping()
    assert course.serves("a", AHEAD)
    assert course.serves("b", START)
    assert not course.serves("c", START)
    assert not RunPhase().serves("a", START)


@pytest.mark.parametrize("delayed", [False, True])
def test_microbatches_count_during_a_step_only_in_a_delayed_run(delayed: bool) -> None:
    assert opened(delayed=delayed).works
    assert stepping(delayed=delayed).works is delayed
    assert not RunPhase(delayed=delayed).works


def test_a_move_that_was_begun_is_not_forgotten_when_members_are_gathered() -> None:
    course = stepping()
    course.gather()
    course.check()
    assert (course.phase, course.target, course.current) == (Phase.GATHERING, AHEAD, START)


def test_a_batch_that_is_not_whole_any_more_leads_nowhere() -> None:
    course = opened()
    course.close(AHEAD.lineage)
    course.reopen()
    course.check()
    assert (course.phase, course.target) == (Phase.OPEN, None)


@pytest.mark.parametrize("jump", [RunPhase.reopen, RunPhase.gather, lambda course: course.close(b"")])
def test_a_phase_never_follows_one_that_the_table_does_not_name(jump: Callable[[RunPhase], None]) -> None:
    with pytest.raises(AssertionError):
        jump(RunPhase())


def test_every_phase_can_be_reached_and_gathering_always_again() -> None:
    assert NEXT.keys() == set(Phase)
    for begin in Phase:
        reached, added = set[Phase](), {begin}
        while added:
            reached |= added
            added = {following for phase in added for following in NEXT[phase]} - reached
        assert reached == set(Phase)
