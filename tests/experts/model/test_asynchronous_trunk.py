"""An asynchronous trunk's microbatches keep the parameters that they began with, and share places in a batch."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import pytest
import torch
import trio

from peerd.experts.model import trunk as trunk_file
from peerd.experts.model.earlier_parameters import TooOld
from peerd.experts.model.landing_queue import GradientQueue
from peerd.experts.model.trunk_microbatch import TrunkMicrobatch
from peerd.experts.model.trunk_stage import TrunkStage
from peerd.messages.swarm import Mb
from peerd.model.stage import footprint
from peerd.model.stage.microbatch_books import Stale
from peerd.run.runfile import LimitsSection, OptimizerSection, RunFile
from tests.experts.model.test_trunk import fly, run_with, text
from tests.worlds.roles.expert_network import NearExperts


def asynchronous(**keys: Any) -> RunFile:
    return run_with(optimizer=OptimizerSection(**{"name": "sgd", "lr": 0.1, "trunk": "asynchronous"} | keys))


def step(stage: TrunkStage) -> None:
    """Make a step with an arbitrary gradient."""
    count, number = stage.trunk.total.count, stage.trunk.step
    stage.commit(number, torch.linspace(-1, 1, count, dtype=stage.trunk.dtype).roll(number).numpy(), 4)


def gradients(stage: TrunkStage, network: NearExperts, flight: TrunkMicrobatch) -> dict[int, torch.Tensor]:
    trio.run(fly, flight, network)
    return flight.gradients


def test_a_microbatch_is_computed_with_the_parameters_that_it_began_with() -> None:
    run = asynchronous()
    network, stage = NearExperts(run), TrunkStage(run, "cpu")
    expected = gradients(stage, network, stage.free_flight(*text()))
    flight, other = stage.free_flight(*text()), stage.free_flight(*text())
    step(stage)
    young = stage.free_flight(*text())
    step(stage)
    found = gradients(stage, network, flight)
    assert all(torch.equal(found[i], one) for i, one in expected.items())
    again = gradients(stage, network, other)
    assert all(torch.equal(again[i], one) for i, one in expected.items())
    different = gradients(stage, network, young)
    assert not all(torch.equal(different[i], one) for i, one in expected.items())


def test_parameters_of_now_are_back_after_a_job_with_old_ones() -> None:
    run = asynchronous()
    network, stage = NearExperts(run), TrunkStage(run, "cpu")
    flight = stage.free_flight(*text())
    step(stage)
    before = stage.trunk.digest()
    gradients(stage, network, flight)
    assert stage.trunk.digest() == before
    step(stage)
    assert stage.trunk.digest() != before


def test_old_parameters_are_kept_once_and_freed_with_their_last_microbatch() -> None:
    stage = TrunkStage(asynchronous(), "cpu")
    flights = [stage.free_flight(*text()) for _ in range(3)]
    step(stage)
    snapshots = {id(flight.era.snapshot) for flight in flights}
    assert len(snapshots) == 1
    assert flights[0].era.snapshot is not None
    assert flights[0].era.snapshot.flat is not None
    before = len([one for one in gc.get_objects() if type(one).__name__ == "Snapshot"])
    flights.clear()
    assert len([one for one in gc.get_objects() if type(one).__name__ == "Snapshot"]) == before - 1


def test_a_microbatch_of_too_old_parameters_is_dropped_and_one_of_another_state_begins_again() -> None:
    run = asynchronous(most_stale=2)
    stage = TrunkStage(run, "cpu")
    flight = stage.free_flight(*text())
    step(stage)
    step(stage)
    flight.depart()
    step(stage)
    with pytest.raises(TooOld):
        flight.depart()
    flight = stage.free_flight(*text())
    stage.load(stage.state())
    with pytest.raises(Stale) as found:
        flight.depart()
    assert not isinstance(found.value, TooOld)


def test_copies_that_are_too_old_to_count_are_freed_although_microbatches_still_hold_them() -> None:
    run = asynchronous(most_stale=2)
    network, stage = NearExperts(run), TrunkStage(run, "cpu")
    under_way = []
    for made in range(6):
        assert len(stage.trunk._earlier) == min(made, 2)
        under_way.append(stage.free_flight(*text()))
        step(stage)
    for flight in under_way[:4]:
        snapshot = flight.era.snapshot
        assert snapshot is not None
        assert snapshot.flat is None
        with pytest.raises(TooOld, match="allowed: 2 behind"):
            flight.depart()
    for flight in under_way[4:]:
        gradients(stage, network, flight)


def test_a_state_that_is_taken_over_frees_the_copies_of_the_one_before() -> None:
    stage = TrunkStage(asynchronous(), "cpu")
    under_way = []
    for _ in range(3):
        under_way.append(stage.free_flight(*text()))
        step(stage)
    assert len(stage.trunk._earlier) == 3
    stage.load(stage.state())
    assert len(stage.trunk._earlier) == 0
    with pytest.raises(Stale):
        under_way[0].depart()


@pytest.mark.parametrize("most", [2, 0])
def test_without_memory_for_a_copy_the_oldest_microbatches_are_dropped_and_steps_go_on(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    run = asynchronous()
    network, stage, under_way, expected = NearExperts(run), TrunkStage(run, "cpu"), [], []
    monkeypatch.setattr(trunk_file, "spare_bytes", lambda _, size: size if len(stage.trunk._earlier) < most else 0)
    for _ in range(4):
        expected.append(gradients(stage, network, stage.free_flight(*text())))
        under_way.append(stage.free_flight(*text()))
        step(stage)
    assert stage.trunk.step == 4
    assert len(stage.trunk._earlier) == most
    for flight in under_way[: 4 - most]:
        with pytest.raises(TooOld, match="there was no memory to keep its parameters"):
            flight.depart()
    for flight, right in zip(under_way[4 - most :], expected[4 - most :], strict=True):
        found = gradients(stage, network, flight)
        assert all(torch.equal(found[i], one) for i, one in right.items())
    gradients(stage, network, stage.free_flight(*text()))


def test_a_limit_of_memory_leaves_room_for_a_copy_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = TrunkStage(msgspec.structs.replace(asynchronous(), limits=LimitsSection(memory_gb=1)), "cpu")
    nbytes = stage.trunk._flat.nbytes
    for left, has_room in ((3 * nbytes, True), (3 * nbytes - 1, False)):
        monkeypatch.setattr(footprint, "_held_bytes", lambda left=left: 10**9 - left)
        assert stage.trunk._has_room() is has_room


def landed(stage: TrunkStage, network: NearExperts, count: int, queue: GradientQueue) -> list[dict[int, torch.Tensor]]:
    found = []
    for seed in range(count):
        flight = stage.free_flight(*text(seed))
        gradients(stage, network, flight)
        found.append({i: one.clone() for i, one in flight.gradients.items()})
        queue.add(flight, stage.trunk.loads)
    return found


def flights(stage: TrunkStage, count: int, size: float = 1.0) -> list[TrunkMicrobatch]:
    """Flights that began now, and have come back with gradients of that size."""
    made = [stage.free_flight(*text(seed)) for seed in range(count)]
    for flight in made:
        parameters = enumerate(stage.trunk._parameters)
        flight.gradients = {i: torch.full_like(parameter, size) for i, parameter in parameters}
    return made


def test_an_old_microbatch_makes_no_younger_ones_too_old() -> None:
    stage, queue = TrunkStage(asynchronous(most_stale=2), "cpu"), GradientQueue(2)
    (old,) = flights(stage, 1)
    step(stage)
    step(stage)
    young = flights(stage, 4)
    for flight in (*young[:2], old, *young[2:]):
        queue.add(flight, stage.trunk.loads)
    first = stage.land_next(2, Mb("me", 1), queue)
    assert first is not None
    assert (first.flights, first.oldest) == (2, 0)  # the old one is in the place that is taken next
    step(stage)
    second = stage.land_next(3, Mb("me", 2), queue)
    assert second is not None
    assert (second.flights, second.oldest) == (3, 2)
    assert queue.too_old == 0


def test_a_microbatch_of_a_state_before_is_refused_and_those_of_the_state_of_now_stay() -> None:
    stage, queue = TrunkStage(asynchronous(), "cpu"), GradientQueue(8)
    before = flights(stage, 2)
    queue.add(before[0], stage.trunk.loads)
    stage.load(stage.state())
    for flight in flights(stage, 2):
        queue.add(flight, stage.trunk.loads)
    queue.add(before[1], stage.trunk.loads)
    assert len(queue) == 2
    assert queue.too_old == 2
    assert stage.land_next(0, Mb("me", 1), queue) is not None


def test_gradients_that_cannot_be_summed_are_counted_as_dropped() -> None:
    stage, queue = TrunkStage(asynchronous(), "cpu"), GradientQueue(1)
    for flight in flights(stage, 3, size=1e38):
        queue.add(flight, stage.trunk.loads)
    with pytest.raises(ValueError, match="has values above"):
        stage.land_next(0, Mb("me", 1), queue)
    assert queue.unusable == 3
    assert stage.held == []


def test_microbatches_that_share_a_place_count_with_their_mean() -> None:
    run = asynchronous()
    network, stage, queue = NearExperts(run), TrunkStage(run, "cpu"), GradientQueue(2)
    alone = landed(stage, network, 5, queue)
    assert len(queue) == 2
    assert queue.shared == 3
    first = stage.land_next(0, Mb("me", 1), queue)
    second = stage.land_next(0, Mb("me", 2), queue)
    assert first is not None
    assert second is not None
    assert [first.flights, second.flights] == [2, 3]
    assert stage.land_next(0, Mb("me", 3), queue) is None
    assert stage.held == [Mb("me", 1), Mb("me", 2)]
    assert first.oldest == second.oldest == 0
    for i, view in enumerate(stage.trunk.layout.views(stage.trunk._sums.due)):
        means = [torch.stack([alone[n][i] for n in group]).mean(0) for group in ([0, 3], [1, 2, 4])]
        assert torch.allclose(view, means[0] + means[1], atol=1e-5)


def test_gradients_that_waited_for_too_long_are_dropped_and_counted() -> None:
    run = asynchronous(most_stale=1)
    network, stage, queue = NearExperts(run), TrunkStage(run, "cpu"), GradientQueue(8)
    landed(stage, network, 2, queue)
    step(stage)
    landed(stage, network, 1, queue)
    step(stage)
    found = stage.land_next(2, Mb("me", 1), queue)
    assert found is not None
    assert found.oldest == 1
    assert queue.too_old == 2
    with pytest.raises(Stale):
        stage.land_next(3, Mb("me", 2), queue)


def test_a_synchronous_trunk_keeps_nothing_and_its_eras_have_no_snapshot() -> None:
    run = msgspec.structs.replace(asynchronous(), optimizer=OptimizerSection(name="sgd", lr=0.1))
    stage = TrunkStage(run, "cpu")
    flight = stage.flight(0, *text())
    assert flight.era.snapshot is None
    step(stage)
    with pytest.raises(Stale):
        flight.depart()
