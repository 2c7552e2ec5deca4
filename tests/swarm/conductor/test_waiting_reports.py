"""Reports that wait: each is woken by its own news, at its own time's end, and by nothing else."""

from __future__ import annotations

import math
import random

import pytest
import trio
from trio.testing import MockClock

from peerd.swarm.conductor.waiting_reports import LOOK_S, WaitingReports


class Desk:
    """Waits, a task that ends them in time as the driver's does, and when each of them was over."""

    def __init__(self) -> None:
        self.looks, self.over = 0, dict[str, float]()
        self._sooner = trio.Event()
        self.waiting = WaitingReports(lambda: self._sooner.set())

    async def keep_time(self) -> None:
        while True:
            self._sooner = trio.Event()
            with trio.move_on_at(self.waiting.look_at):
                await self._sooner.wait()
            self.looks += 1
            self.waiting.end(trio.current_time())

    async def wait(self, name: str, group: str, wait_s: float) -> None:
        await self.waiting.wait(group, trio.current_time() + wait_s)
        self.over[name] = trio.current_time()


async def test_news_wake_those_of_its_group_and_time_ends_the_others(autojump_clock: MockClock) -> None:
    desk, began = Desk(), trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.keep_time)
        for name, group in (("first", "one"), ("second", "one"), ("other", "two")):
            nursery.start_soon(desk.wait, name, group, 8.0)
        await trio.sleep(2.0)
        desk.waiting.news("one")
        await trio.sleep(5.0)
        assert {name: at - began for name, at in desk.over.items()} == {"first": 2.0, "second": 2.0}
        await trio.sleep(2.0)
        assert 8.0 <= desk.over["other"] - began <= 8.0 + LOOK_S
        assert desk.waiting.look_at == math.inf, "nothing waits, and nothing is looked at"
        for group in ("one", "two", "three"):
            nursery.start_soon(desk.wait, f"late {group}", group, 8.0)
        await trio.sleep(1.0)
        desk.waiting.news_but_for("two")
        await trio.sleep(0.1)
        assert desk.over.keys() == {"first", "second", "other", "late one", "late three"}
        nursery.cancel_scope.cancel()


async def test_very_short_waits_are_looked_at_together(autojump_clock: MockClock) -> None:
    desk = Desk()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.keep_time)
        for number in range(100):
            nursery.start_soon(desk.wait, str(number), str(number), 0.01 + number / 100)
            await trio.sleep(0.001)
        await trio.sleep(3.0)
        assert len(desk.over) == 100
        assert desk.looks <= 10
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(10))
async def test_a_wait_lasts_until_its_news_or_its_end(autojump_clock: MockClock, seed: int) -> None:
    rng, desk = random.Random(seed), Desk()
    ends, given = dict[str, tuple[float, str]](), list[tuple[float, str]]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.keep_time)
        for number in range(60):
            group, wait_s = rng.choice("abc"), rng.choice((0.1, 1.0, 8.0)) * rng.random()
            nursery.start_soon(desk.wait, str(number), group, wait_s)
            ends[str(number)] = trio.current_time() + wait_s, group
            await trio.sleep(rng.random())
            if rng.random() < 0.2:
                given.append((trio.current_time(), rng.choice("abc")))
                desk.waiting.news(given[-1][1])
                await trio.sleep(0.0)
        await trio.sleep(10.0)
        nursery.cancel_scope.cancel()
    for name, (end, group) in ends.items():
        over = desk.over[name]
        assert (over, group) in given or end <= over <= end + LOOK_S, name


async def test_a_cancelled_wait_leaves_nothing(autojump_clock: MockClock) -> None:
    desk = Desk()
    with trio.move_on_after(1.0):
        await desk.wait("gone", "one", 8.0)
    desk.waiting.news("one")
    desk.waiting.end(trio.current_time() + 100.0)
    assert not desk.over
    assert desk.waiting.idle
    assert desk.waiting.look_at == math.inf
