"""A timer wakes its machine when the machine says so, also when that changes while it sleeps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import trio
import trio.testing

from peerd.wire.timer import Timer


@dataclass
class Machine:
    """Wants to be woken at some instants; notes when it was."""

    due: list[float] = field(default_factory=list)
    woken: list[float] = field(default_factory=list)

    def wake_at(self) -> float:
        return min(self.due, default=math.inf)

    def wake(self) -> None:
        now = trio.current_time()
        self.woken.append(now)
        self.due = [at for at in self.due if at > now]


async def test_it_wakes_at_each_instant_in_turn(autojump_clock: trio.testing.MockClock) -> None:
    machine = Machine([3.0, 1.0])
    with trio.move_on_after(10):
        await Timer(machine.wake_at, machine.wake).run()
    assert machine.woken == [1.0, 3.0]


async def test_an_instant_that_comes_up_while_it_sleeps_counts_once_it_is_rearmed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    machine = Machine()
    timer = Timer(machine.wake_at, machine.wake)
    timer.rearm()  # before it runs: nothing is due
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        await trio.sleep(5)
        assert machine.woken == []
        machine.due.append(6.0)
        timer.rearm()
        await trio.sleep(2)
        assert machine.woken == [6.0]
        machine.due.append(trio.current_time())  # at once
        timer.rearm()
        await trio.testing.wait_all_tasks_blocked()
        assert machine.woken == [6.0, 7.0]
        nursery.cancel_scope.cancel()


async def test_a_later_instant_costs_one_idle_look(autojump_clock: trio.testing.MockClock) -> None:
    machine = Machine([2.0])
    timer = Timer(machine.wake_at, machine.wake)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(timer.run)
        await trio.sleep(1)
        machine.due = [4.0]
        timer.rearm()
        await trio.sleep(5)
        assert machine.woken == [2.0, 4.0]
        nursery.cancel_scope.cancel()


async def test_what_the_machine_asks_for_while_it_is_woken_counts(autojump_clock: trio.testing.MockClock) -> None:
    woken: list[float] = []

    def wake() -> None:
        woken.append(trio.current_time())
        timer.rearm()

    timer = Timer(lambda: len(woken) + 1.0 if len(woken) < 3 else math.inf, wake)
    with trio.move_on_after(10):
        await timer.run()
    assert woken == [1.0, 2.0, 3.0]


async def test_an_error_of_the_machine_ends_it() -> None:
    def wake() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await Timer(lambda: -math.inf, wake).run()
