"""The memory estimate for microbatches under way equals the most memory that they use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
import trio
from torch import Tensor

from peerd.experts.model.landing_queue import GradientQueue
from peerd.experts.model.trunk_microbatch import TrunkMicrobatch
from peerd.experts.model.trunk_stage import TrunkStage
from peerd.model.shapes.trunk_memory import GRADIENT_BYTES, NO_FLIGHTS, FlightMemory, flight_memory
from peerd.model.stage.footprint import footprint, lacking
from peerd.run.expert_network import ExpertCall, ExpertReply
from peerd.run.runfile import BatchSection, ExpertsSection, LimitsSection, ModelSection, OptimizerSection, RunFile
from tests.experts.model.test_asynchronous_trunk import step
from tests.experts.model.test_trunk import run_with, text
from tests.worlds.roles.expert_network import NearExperts

Messages = Sequence[ExpertCall | ExpertReply | None]


def tensors_in(thing: object) -> Iterator[Tensor]:
    """All tensors that an object refers to, except those of a trunk, of calls, and gradients of parameters."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict | list | tuple):
        for one in thing.values() if isinstance(thing, dict) else thing:
            yield from tensors_in(one)
    elif hasattr(thing, "__slots__") or hasattr(thing, "__dict__"):
        for name in (*getattr(type(thing), "__slots__", ()), *getattr(thing, "__dict__", ())):
            if name not in ("_trunk", "_given", "_device", "_calls", "gradients", "__weakref__") and not isinstance(
                thing, type
            ):
                yield from tensors_in(getattr(thing, name, None))


def held_bytes(flight: TrunkMicrobatch, messages: Messages) -> tuple[int, int]:
    """Bytes on the device, and bytes of calls and their messages, including `messages`, which are being exchanged."""
    calls = [call for stop in flight._stops if stop.exchange for call in stop.exchange._calls]
    frames = {
        id(frame): len(frame.payload)
        for one in (*(call.ask for call in calls), *(call.reply for call in calls), *messages)
        if one is not None
        for frame in (one.frames if isinstance(one, ExpertCall) else (one.frame,))
    }
    places = sum(call.samples.nbytes + call.slots.nbytes for call in calls)
    storages = [tensor.untyped_storage() for tensor in tensors_in(flight)]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values()), sum(frames.values()) + places


async def most_held(flight: TrunkMicrobatch, network: NearExperts, k: int) -> tuple[int, int]:
    """Run the flight; returns the largest `held_bytes` while it waits for answers."""
    seen: list[tuple[int, int]] = []
    scores: Any = flight.depart()
    while scores is not None:
        asks = flight.ask(await network.choose(flight.layer, scores, k))
        replies = await network.forward(asks, flight.samples)
        seen.append(held_bytes(flight, [*asks, *replies]))
        scores = flight.go_on(replies)
    back: Any = flight.turn()
    while back is not None:
        replies = await network.backward(back)
        seen.append(held_bytes(flight, [*back, *replies]))
        back = flight.go_back(replies)
    return max(seen, key=sum)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("k", [1, 3])
def test_what_is_foretold_is_what_a_microbatch_holds(k: int, dtype: Any) -> None:
    model = ModelSection(d_model=64, heads=2, layers=3, context=32, dtype=dtype)
    run = run_with(ExpertsSection(block="ffn", grid=[3, 4], top_k=k), model=model)
    stage = TrunkStage(run, "cpu")
    flight = stage.free_flight(*(tokens.repeat(1, 4) for tokens in text()))
    device, messages = trio.run(most_held, flight, NearExperts(run), k)
    trunk_bytes = stage.trunk._flat.nbytes
    assert sum(gradient.untyped_storage().nbytes() for gradient in flight.gradients.values()) == trunk_bytes
    foretold = flight_memory(run, trunk_bytes, stage.trunk.dtype.itemsize).least
    beside = trunk_bytes + 2 * k * 2 * 32 * 64 * stage.trunk.dtype.itemsize  # gradients, and the memory of one job
    assert 0.95 * (foretold.device - beside) <= device <= foretold.device - beside
    assert 0.7 * foretold.machine <= messages <= foretold.machine


def memory(run: RunFile, trunk_bytes: int = 1000) -> FlightMemory:
    return flight_memory(run, trunk_bytes, 4)


def with_trunk(flights: int = 0, places: int = 100, **optimizer: Any) -> RunFile:
    limits = LimitsSection(microbatches_in_flight=flights)
    batch = BatchSection(target_samples=2 * places)
    return run_with(limits=limits, batch=batch, optimizer=OptimizerSection(name="sgd", **optimizer))


def test_as_many_are_counted_as_limits_allow() -> None:
    asynchronous: dict[str, Any] = {"trunk": "asynchronous"}
    assert memory(with_trunk(**asynchronous)).flights == 64
    assert memory(with_trunk(300, **asynchronous)).flights == 300
    assert memory(with_trunk(places=4, **asynchronous)).flights == 64
    assert memory(with_trunk(places=4)).flights == 4
    assert memory(with_trunk(places=4, delayed=True)).flights == 8
    assert memory(with_trunk(**asynchronous), GRADIENT_BYTES // 10).flights == 10
    assert memory(with_trunk(**asynchronous), 2 * GRADIENT_BYTES).flights == 1


def test_a_synchronous_trunk_has_no_copies_and_an_asynchronous_one_at_most_one_for_each_microbatch() -> None:
    assert memory(with_trunk()).copies == 0
    assert memory(with_trunk(trunk="asynchronous")).copies == 33  # 32 that may still count, and the next one
    assert memory(with_trunk(trunk="asynchronous", most_stale=1000)).copies == 64
    assert memory(with_trunk(5, trunk="asynchronous")).copies == 5


def test_copies_flights_and_gradients_that_wait_are_each_as_large_as_the_trunk() -> None:
    plain, large = (memory(with_trunk(5, places=3, trunk="asynchronous", most_stale=1), size) for size in (0, 1000))
    assert large.most.device - plain.most.device == (5 + 2 + 3) * 1000
    assert large.most.machine == plain.most.machine == 5 * plain.least.machine


def test_the_trunk_never_keeps_more_copies_and_the_queue_no_more_gradients_than_are_foretold() -> None:
    run = with_trunk(6, places=3, trunk="asynchronous", most_stale=2)
    foretold = memory(run)
    stage, queue, most = TrunkStage(run, "cpu"), GradientQueue(3), 0
    flights = []
    for _ in range(8):
        flights = [*flights[-5:], stage.free_flight(*text())]
        step(stage)
        most = max(most, len(stage.trunk._earlier))
    assert most == 2 < foretold.copies == 3
    for flight in flights[-2:] * 4:
        flight.gradients = dict(enumerate(stage.trunk._parameters))
        queue.add(flight, stage.trunk.loads)
    assert len(queue) == 3


def test_a_stage_counts_what_is_under_way_and_is_refused_for_less() -> None:
    run = with_trunk(300, trunk="asynchronous")
    taken, plain = footprint(run, 0), footprint(msgspec.structs.replace(run, experts=None), 0)
    assert plain.flights == NO_FLIGHTS
    assert taken.flights.flights == 300
    for device in ("cpu", "cuda"):
        beside, least = taken.held(device), taken.held(device, least=True)
        assert sum(beside) == taken.device_bytes + taken.machine_bytes + sum(taken.flights.most)
        assert sum(least) == taken.device_bytes + taken.machine_bytes + sum(taken.flights.least)
    assert lacking(taken, "cpu") is None
