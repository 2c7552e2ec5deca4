"""The totals of the last steps, and the way along them, without a network."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import Refused, RemoteError, Unreachable
from peerd.core.limits import STATE_TOTALS, STATE_TRAIL
from peerd.messages.swarm import Position
from peerd.state.catchup.step_totals import StepTotal, StepTotals
from peerd.state.catchup.totals_trail import TotalsTrail


def at(step: int) -> Position:
    return Position(step, b"%d" % step)


def leap(step: int, elements: int = 4) -> StepTotal:
    return StepTotal(at(step + 1), np.full(elements, step, "float32"))


class Swarm:
    """Goes on by itself; keeps the totals of its last `kept` steps; fails the calls that `failures` names."""

    def __init__(
        self, step: int, kept: int = STATE_TOTALS, failures: tuple[type[RemoteError] | None, ...] = ()
    ) -> None:
        self.goal: Position | None = at(step)
        self.kept = kept
        self.failures = list(failures)
        self.asked: list[int] = []

    async def fetch(self, before: Position) -> StepTotal:
        assert self.goal is not None
        self.asked.append(before.step)
        await trio.sleep(0.1)
        if self.failures and (failure := self.failures.pop(0)) is not None:
            raise failure("no")
        if not self.goal.step - self.kept <= before.step < self.goal.step or before != at(before.step):
            raise Refused("not kept")
        return leap(before.step)

    def trail(self) -> TotalsTrail:
        return TotalsTrail(self.fetch, lambda: self.goal)


async def walked(trail: TotalsTrail) -> list[int]:
    """The steps that the whole trail leads to."""
    steps = []
    while (found := await trail.next()) is not None:
        assert found.total[0] == found.target.step - 1
        steps.append(found.target.step)
    return steps


async def lay_and_walk(trail: TotalsTrail, start: int) -> list[int]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trail.lay)
        trail.begin(at(start))
        steps = await walked(trail)
        nursery.cancel_scope.cancel()
    return steps


async def test_a_trail_leads_to_where_the_swarm_stands(autojump_clock: object) -> None:
    trail = Swarm(9).trail()
    assert await lay_and_walk(trail, 5) == [6, 7, 8, 9]
    assert trail.broken is None


async def test_it_is_laid_while_nobody_walks_it_and_the_swarm_goes_on(autojump_clock: object) -> None:
    swarm = Swarm(5, kept=2)
    trail = swarm.trail()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trail.lay)
        trail.begin(at(4))
        for step in range(6, 20):
            await trio.sleep(0.15)
            swarm.goal = at(step)
            trail.look()
        assert await walked(trail) == list(range(5, 20))
        nursery.cancel_scope.cancel()


async def test_one_that_falls_behind_what_is_kept_is_broken(autojump_clock: object) -> None:
    trail = Swarm(9, kept=2).trail()
    assert await lay_and_walk(trail, 5) == []
    assert trail.broken is not None
    assert "step 5" in trail.broken


async def test_a_swarm_that_went_back_is_not_reached_by_going_on(autojump_clock: object) -> None:
    trail = Swarm(3).trail()
    assert await lay_and_walk(trail, 5) == []
    assert "another branch" in str(trail.broken)


@pytest.mark.parametrize("failures", [(Refused,), (Unreachable,) * 3, (None, Refused, None, Refused)])
async def test_what_fails_now_and_then_is_asked_for_again(
    autojump_clock: object, failures: tuple[type[RemoteError] | None, ...]
) -> None:
    trail = Swarm(9, failures=failures).trail()
    assert await lay_and_walk(trail, 5) == [6, 7, 8, 9]


@pytest.mark.parametrize("failures", [(Refused,) * 2, (Unreachable,) * 4])
async def test_what_fails_again_and_again_ends_it(
    autojump_clock: object, failures: tuple[type[RemoteError] | None, ...]
) -> None:
    trail = Swarm(9, failures=(None, *failures)).trail()
    assert await lay_and_walk(trail, 5) == [6]
    assert trail.broken is not None


async def test_a_new_beginning_lets_go_of_the_old_one(autojump_clock: object) -> None:
    swarm = Swarm(9)
    trail = swarm.trail()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trail.lay)
        trail.begin(at(2))
        await trio.sleep(0.25)  # two leaps are there, one is on its way
        trail.begin(at(6))
        assert await walked(trail) == [7, 8, 9]
        nursery.cancel_scope.cancel()


async def test_a_trail_that_nobody_walks_has_an_end(autojump_clock: object) -> None:
    swarm = Swarm(STATE_TRAIL + 50, kept=STATE_TRAIL + 50)
    trail = swarm.trail()
    with trio.move_on_after(1000):
        trail.begin(at(0))
        await trail.lay()
    assert len(swarm.asked) == STATE_TRAIL


@pytest.mark.slow
@given(
    steps=st.lists(st.integers(0, 300), max_size=200),
    most_bytes=st.integers(0, 200),
    most=st.integers(0, 100),
)
def test_totals_stay_within_their_bounds_and_the_newest_stay(steps: list[int], most_bytes: int, most: int) -> None:
    totals = StepTotals(most_bytes, most)
    for step in steps:
        totals.keep(at(step), leap(step, 2))
        assert totals.nbytes <= most_bytes
        assert len(totals) <= min(most, STATE_TOTALS)
    fits = min(most, STATE_TOTALS, most_bytes // 8)
    newest = list(dict.fromkeys(reversed(steps)))[:fits]
    for step in set(steps):
        found = totals.after(at(step))
        assert (found is not None) == (step in newest)
        assert found is None or found.target == at(step + 1)
    assert totals.after(Position(1, b"another branch")) is None
