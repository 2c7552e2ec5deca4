"""A few members that answer nothing, or refuse: the others wait for them no longer than half of the stage took."""

from __future__ import annotations

from peerd.swarm.events import Note, PrepareEnded
from peerd.swarm.positions.phases import Phase
from tests.swarm.steps.test_sums_once import Summing

ENOUGH_S = 300


def wait(grid: Summing) -> float:
    """Seconds until the stage is settled; members answer only what they are asked now."""
    began = grid.now
    while grid.conductor.phase is Phase.CLOSING and grid.now < began + ENOUGH_S:
        grid.now += 1.0
        grid.out += grid.conductor.wake(grid.now)
    return grid.now - began


def nine() -> Summing:
    """Nine members in a grid of three times three, each with a microbatch."""
    grid = Summing(1, 9, 9)
    grid.done(*[(seq, f"p{seq}") for seq in range(9)])
    return grid


def test_a_group_whose_majority_answers_nothing_is_not_waited_for_to_the_end() -> None:
    grid = nine()
    (first, group), *others = grid.under_way()
    assert len(group) == 3
    for attempt, _ in others:
        grid.finish(attempt)
    grid.finish(first, silent=group[1:])
    silent, aside = {*group[1:]}, set[str]()
    for _ in range(60):
        for attempt, here in grid.under_way():
            if attempt != first and attempt in dict(grid.under_way()):
                grid.finish(attempt, silent=tuple(silent.intersection(here)))
        grid.now += 1.0
        found = grid.conductor.wake(grid.now)
        grid.out += found
        notes = [output.text for output in found if isinstance(output, Note)]
        aside |= {peer for peer in silent for note in notes if f"…{peer} " in note and "put aside" in note}
    assert aside == silent
    assert grid.conductor.batches.due.missing == [len(silent)]  # what they had is to be done by others


def test_members_that_do_not_take_a_copy_are_left_behind() -> None:
    grid = nine()
    for attempt, _ in grid.under_way():
        grid.finish(attempt)
    (first, _), *others = grid.under_way()
    grid.finish(first)
    for attempt, group in others:
        if attempt in dict(grid.under_way()):
            grid.tell(PrepareEnded(group[0], attempt, False))
    for _ in range(10):
        grid.now += 0.5
        grid.out += grid.conductor.wake(grid.now)
    assert grid.under_way()
    for attempt, group in grid.under_way():
        grid.finish(attempt, silent=group[1:])
    assert grid.conductor.phase is Phase.CLOSING
    assert wait(grid) < 60


def test_a_batch_that_shrinks_makes_no_pause_where_nothing_is_summed() -> None:
    flat = Summing(1, 4, 4, group_size=0)
    close = flat.conductor._closing.stages[0]
    flat.done(*[(seq, f"p{seq}") for seq in range(4)])
    ((attempt, group),) = flat.under_way()
    assert len(group) == 4
    flat.tell(PrepareEnded("p0", attempt, False, refused=flat.known[attempt][0].assigned))
    assert len(flat.conductor.batches.due.entries) == 3
    assert (close.failures, close.not_before, close.problem) == (0, 0.0, "")
