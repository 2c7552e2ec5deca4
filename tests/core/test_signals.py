"""A signal wakes all who wait when it is given, each time, and nobody who comes later."""

from __future__ import annotations

import trio
import trio.testing

from peerd.core.signals import Signal


async def test_all_who_wait_are_woken_each_time() -> None:
    signal, woken = Signal(), list[str]()

    async def wait(name: str, times: int) -> None:
        for _ in range(times):
            await signal.wait()
            woken.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "a", 2)
        nursery.start_soon(wait, "b", 1)
        await trio.testing.wait_all_tasks_blocked()
        signal.notify()
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(woken) == ["a", "b"]
        signal.notify()
    assert sorted(woken) == ["a", "a", "b"]


async def test_it_is_not_kept_for_who_comes_later(autojump_clock: trio.testing.MockClock) -> None:
    signal = Signal()
    signal.notify()
    with trio.move_on_after(1) as limit:
        await signal.wait()
    assert limit.cancelled_caught


async def test_one_that_comes_at_the_last_moment_of_a_wait_is_not_lost(autojump_clock: trio.testing.MockClock) -> None:
    signal, seen = Signal(), False

    async def give() -> None:
        nonlocal seen
        await trio.sleep(1)
        seen = True
        signal.notify()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give)
        while not seen:
            with trio.move_on_after(1):
                await signal.wait()
    assert trio.current_time() <= 2
