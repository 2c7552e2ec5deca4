"""A failed flight keeps no snapshot in memory while its microbatch waits for a retry or is reported."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import TooFewExperts
from peerd.experts.model.earlier_parameters import Snapshot
from peerd.experts.trainer.expert_flights import ExpertFlights
from peerd.log import EventLog
from peerd.model.stage.stage_module import ResultNotFinite
from peerd.pipeline.routes.second_opinion import MicrobatchNotFinite
from peerd.pipeline.stage.member import StageMember
from peerd.run.expert_network import ExpertNetwork
from peerd.run.runfile import RunFile
from tests.worlds.simulation.clock import SimClock


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


class Failing:
    """Flights that each have a snapshot and fail with `error`."""

    def __init__(self, error: type[Exception]) -> None:
        clock = SimClock(1, "peer")
        host = SimpleNamespace(id=SimpleNamespace(text="me"))
        ctx: Any = SimpleNamespace(run=RunFile(run="x"), log=EventLog(clock), clock=clock, host=host)
        self.flights = ExpertFlights(ctx, cast(StageMember, None), cast(ExpertNetwork, None))
        self.error, self.held = error, list[weakref.ref[Snapshot]]()

    async def fly(self) -> None:
        snapshot = Snapshot()
        self.held.append(weakref.ref(snapshot))
        await trio.lowlevel.checkpoint()
        raise self.error("it failed")

    @property
    def alive(self) -> list[bool]:
        return [ref() is not None for ref in self.held]


@pytest.mark.usefixtures("_no_collection")
async def test_a_flight_that_begins_again_after_a_pause_holds_nothing_in_it(autojump_clock: MockClock) -> None:
    failing = Failing(TooFewExperts)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(failing.flights._again_until_done, failing.fly, None)
        await trio.testing.wait_all_tasks_blocked()
        assert failing.alive == [False]
        nursery.cancel_scope.cancel()


@pytest.mark.usefixtures("_no_collection")
async def test_a_microbatch_that_is_reported_as_not_finite_holds_nothing(autojump_clock: MockClock) -> None:
    failing = Failing(ResultNotFinite)
    with pytest.raises(MicrobatchNotFinite, match="it failed") as found:
        await failing.flights._again_until_done(failing.fly, None, drops=True)
    assert failing.alive == [False, False]
    assert found.value.peers == ["me"]
