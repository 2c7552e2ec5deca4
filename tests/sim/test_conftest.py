"""The test runner itself: virtual time, repeatable order, and the watchdog on the real clock."""

from __future__ import annotations

import gc
import time

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peerd.core.errors import LocalError
from tests.kit.amount import examples
from tests.kit.watchdog import LIMIT_S, LoopWatchdog, excused
from tests.worlds.simulation.clock import SimAgenda, SimClock, deterministic_scheduling, run_virtual


async def test_virtual_time_costs_no_time(autojump_clock: trio.testing.MockClock) -> None:
    started = time.perf_counter()
    await trio.sleep(86_000)
    assert trio.current_time() == 86_000
    assert time.perf_counter() - started < 5


@given(st.floats(min_value=0, max_value=1e6))
@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_each_example_of_a_property_has_its_own_clock(
    autojump_clock: trio.testing.MockClock, wait_s: float
) -> None:
    await trio.sleep(wait_s)
    assert trio.current_time() == wait_s


@pytest.mark.slow
def test_the_watchdog_names_the_task_that_blocks() -> None:
    watchdog = LoopWatchdog()

    async def compute_far_too_long() -> None:
        until = time.thread_time() + 0.3
        while time.thread_time() < until:
            pass

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, 0)
            nursery.start_soon(compute_far_too_long)

    trio.run(main, instruments=[watchdog])
    complaint = watchdog.complaint()
    assert complaint is not None
    assert "compute_far_too_long" in complaint


async def test_a_loop_that_only_waits_does_not_wake_the_watchdog() -> None:
    watchdog = LoopWatchdog()
    trio.lowlevel.add_instrument(watchdog)
    await trio.sleep(0.01)
    trio.lowlevel.remove_instrument(watchdog)
    assert watchdog.complaint() is None


def block(seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.slow
@pytest.mark.parametrize(("excused_s", "after_s"), [(2 * LIMIT_S, 0.0), (0.01, 2 * LIMIT_S)])
def test_an_excused_block_does_not_count_and_what_follows_it_does(excused_s: float, after_s: float) -> None:
    async def start_a_process() -> None:
        with excused():
            block(excused_s)
        block(after_s)

    watchdog = LoopWatchdog()
    trio.run(start_a_process, instruments=[watchdog])
    assert (watchdog.complaint() is None) == (after_s == 0)


async def test_a_watched_run_collects_only_its_own_garbage() -> None:
    assert len(gc.get_objects()) < 10_000, "what the session holds would be searched in a step of the test's code"


def test_the_session_collects_its_garbage_between_watched_runs() -> None:
    watchdog = LoopWatchdog()
    trio.run(trio.sleep, 0, instruments=[watchdog])
    assert gc.get_freeze_count() == 0


async def _race(order: list[int], number: int) -> None:
    await trio.sleep(1)
    order.append(number)


async def _three_hundred() -> list[int]:
    order: list[int] = []
    async with trio.open_nursery() as nursery:
        for number in range(300):
            nursery.start_soon(_race, order, number)
    return order


def test_the_order_of_tasks_follows_from_the_seed() -> None:
    first = run_virtual(_three_hundred, seed=1)
    assert run_virtual(_three_hundred, seed=1) == first
    assert run_virtual(_three_hundred, seed=2) != first


def test_trio_still_has_the_private_names_that_make_runs_repeat() -> None:
    from trio._core import _run

    assert isinstance(_run._ALLOW_DETERMINISTIC_SCHEDULING, bool)
    before = _run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r.getstate()
    with deterministic_scheduling(3):
        assert _run._ALLOW_DETERMINISTIC_SCHEDULING is True
    assert (_run._ALLOW_DETERMINISTIC_SCHEDULING, _run._r.getstate()) == before


def test_a_trio_without_the_private_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trio._core import _run

    monkeypatch.delattr(_run, "_r")
    with pytest.raises(LocalError, match="repeat"), deterministic_scheduling(3):
        pass


async def test_the_agenda_keeps_the_order_of_time_and_of_asking(autojump_clock: trio.testing.MockClock) -> None:
    agenda, seen = SimAgenda(), list[str]()
    async with trio.open_nursery() as nursery:
        await nursery.start(agenda.run)
        agenda.at(2.0, lambda: seen.append("late"))
        agenda.at(1.0, lambda: seen.append("early"))
        agenda.at(1.0, lambda: seen.append("early, asked later"))
        agenda.at(0.0, lambda: seen.append("now"))
        assert seen == ["now"]
        await trio.sleep(3)
        nursery.cancel_scope.cancel()
    assert seen == ["now", "early", "early, asked later", "late"]


async def test_an_agenda_that_does_not_run_refuses_what_would_never_happen(
    autojump_clock: trio.testing.MockClock,
) -> None:
    with pytest.raises(LocalError, match="does not run"):
        SimAgenda().at(1.0, lambda: None)


async def test_a_sim_clock_repeats_itself_and_has_its_own_skew(autojump_clock: trio.testing.MockClock) -> None:
    clock, twin = SimClock(5, "a", skew_s=3.0), SimClock(5, "a")
    other = SimClock(5, "b")
    assert clock.secure_bytes(16) == twin.secure_bytes(16) != other.secure_bytes(16)
    assert clock.rng("x").random() == clock.rng("x").random() == twin.rng("x").random()
    assert clock.rng("x").random() != clock.rng("y").random()
    await trio.sleep(10)
    assert clock.now() == 10
    assert clock.wall() - twin.wall() == 3.0
    clock.offset_s = -3.0
    assert clock.wall() == twin.wall()
