"""Services that are kept running: each fault ends one of them for a while, and nothing else."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from peerd.core.errors import ConfigError
from peerd.wire.faults import Faults
from peerd.wire.host.upkeep import PAUSES_S, Upkeep


class Flaky:
    """A service that fails in the given ways, one after the other, and then runs on."""

    def __init__(self, *failures: BaseException, ready: bool = True) -> None:
        self.failures, self.ready = list(failures), ready
        self.began: list[float] = []

    async def __call__(self, *, task_status: trio.TaskStatus[None]) -> None:
        self.began.append(trio.current_time())
        if self.ready:
            task_status.started()
        async with trio.open_nursery() as nursery:  # as services do: what fails is one of several tasks
            nursery.start_soon(trio.sleep_forever)
            if self.failures:
                await trio.sleep(1)
                raise self.failures.pop(0)
            task_status.started()


async def test_a_service_that_fails_begins_again_after_ever_longer_pauses(
    autojump_clock: trio.testing.MockClock,
) -> None:
    faults, flaky = Faults(), Flaky(*(ValueError(str(n)) for n in range(9)))
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(Upkeep(faults).run, "flaky", flaky)
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()
    expected, at = [], began
    for pause_s in (*PAUSES_S, 60.0, 60.0, 0.0):
        expected.append(at)
        at += 1 + pause_s
    assert flaky.began == pytest.approx(expected)
    assert faults.total == 9
    assert "test_upkeep.py" in faults.last or "peerd" in faults.last
    assert [fault.where for fault in faults.places.values()] == ["service flaky"]


async def test_who_waits_for_a_service_goes_on_when_it_cannot_start(autojump_clock: trio.testing.MockClock) -> None:
    faults, flaky = Faults(), Flaky(KeyError("x"), ready=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(Upkeep(faults).run, "flaky", flaky)
        assert faults.total == 1
        await trio.sleep(10)
        assert len(flaky.began) == 2
        nursery.cancel_scope.cancel()


async def test_what_the_user_has_to_mend_passes(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            await nursery.start(Upkeep(Faults()).run, "flaky", Flaky(ConfigError("the port is taken"), ready=False))
    assert "the port is taken" in str(caught.value.exceptions)


async def test_a_service_that_returns_has_ended(autojump_clock: trio.testing.MockClock) -> None:
    faults, runs = Faults(), []

    async def brief() -> None:
        runs.append(1)

    await Upkeep(faults).run_plain("brief", brief)
    assert (runs, faults.total) == ([1], 0)


async def test_a_service_that_ran_long_begins_again_soon(autojump_clock: trio.testing.MockClock) -> None:
    began: list[float] = []

    async def lasting() -> None:
        began.append(trio.current_time())
        await trio.sleep(100)
        raise ValueError("after a while")

    with trio.move_on_after(350):
        await Upkeep(Faults()).run_plain("lasting", lasting)
    assert [b - began[0] for b in began] == pytest.approx([0, 101, 202, 303])
