"""Memory of the microbatches that a trainer of a run with experts has under way: how many, and what each keeps.

A microbatch keeps, for each layer of experts, what its segment ends with and the answers, the messages that carried
both, and on its way back the gradients of the trunk that it has so far. With an asynchronous trunk gradients that came
back wait for a place in a batch, and the trunk keeps a copy of its parameters for each earlier step that a microbatch
began at. Experts' messages count as if they were not coded.

Shapes: B samples of text, L tokens, D d_model; N samples of the experts, K experts for each, G places in all dimensions
of their grid together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from peerd.core.experts.grid import grid_of, sample_shapes
from peerd.core.run.runfile import ExpertsSection, RunFile

IN_FLIGHT: Final = 64  # microbatches at once, unless the run file says otherwise: answers take long, not computing
GRADIENT_BYTES: Final = 1 << 30  # of all that are on their way back, unless the run file says otherwise

_WIRE_BYTES: Final = {"float32": 4, "bfloat16": 2}
_INDEX_BYTES: Final = 8
_CALL_BYTES: Final = 80  # of a sample's place in a call: in tensors, and in lists of Python


class DeviceAndMachine(NamedTuple):
    """Bytes where the trunk computes, and of the machine's memory beside that."""

    device: int
    machine: int


@dataclass(frozen=True, slots=True)
class FlightMemory:
    """Bytes that microbatches under way take. `least`: with one of them at a time, and no copy of parameters."""

    flights: int
    copies: int  # of the trunk's parameters of earlier steps
    most: DeviceAndMachine
    least: DeviceAndMachine


NO_FLIGHTS: Final = FlightMemory(0, 0, DeviceAndMachine(0, 0), DeviceAndMachine(0, 0))


def flights_at_once(run: RunFile, trunk_bytes: int) -> int:
    """Microbatches that one trainer has under way at most, if the batch has as many places for it."""
    return run.limits.microbatches_in_flight or min(IN_FLIGHT, gradients_in_memory(trunk_bytes))


def gradients_in_memory(trunk_bytes: int) -> int:
    """Gradients of a trunk of this size that a trainer keeps at most, unless the run file says otherwise."""
    return max(1, GRADIENT_BYTES // max(1, trunk_bytes))


def places_at_once(run: RunFile) -> int:
    """Places in one batch of the trunk."""
    return max(1, run.batch.target_samples // run.pipeline.microbatch)


def flight_memory(run: RunFile, trunk_bytes: int, item_bytes: int) -> FlightMemory:
    """The memory of the microbatches that one trainer has under way. `item_bytes`: of a value of the trunk."""
    flights, places = flights_at_once(run, trunk_bytes), places_at_once(run)
    copies = queued = 0
    if run.optimizer.asynchronous:
        copies = min(flights, run.optimizer.most_stale + 1)  # one more while a step is made
        queued = min(places, gradients_in_memory(trunk_bytes))
    else:
        flights = min(flights, places * (2 if run.optimizer.delayed else 1))
    each, job = _flight_bytes(run, item_bytes), _job_bytes(run, item_bytes)
    device = each.device + trunk_bytes
    most = DeviceAndMachine(flights * device + (copies + queued) * trunk_bytes + job, flights * each.machine)
    return FlightMemory(flights, copies, most, DeviceAndMachine(device + job, each.machine))


def _flight_bytes(run: RunFile, item_bytes: int) -> DeviceAndMachine:
    """Of one microbatch that waits for the last answers on its way back, without gradients of parameters."""
    section, grid, values, samples = run.experts or ExpertsSection(), grid_of(run), _values(run), _samples(run)
    ends = (2 * values + samples * sum(grid.sides)) * item_bytes  # residual, samples and scores of a junction
    indexes = samples * section.top_k * (_INDEX_BYTES * len(grid.sides) + 2)
    layer = ends + section.top_k * values * item_bytes + indexes
    texts = 2 * _INDEX_BYTES * run.pipeline.microbatch * run.model.context
    messages = 2 * section.top_k * values * _WIRE_BYTES[section.dtype]  # there and back
    calls = samples * section.top_k * _CALL_BYTES
    return DeviceAndMachine(grid.layers * layer + ends + texts, grid.layers * (messages + calls) + messages)


def _job_bytes(run: RunFile, item_bytes: int) -> int:
    """Of answers, and of their gradients, while one segment is computed."""
    return 2 * (run.experts or ExpertsSection()).top_k * _values(run) * item_bytes


def _values(run: RunFile) -> int:
    """B x L x D: of all samples of a layer of experts together."""
    return run.pipeline.microbatch * run.model.context * run.model.d_model


def _samples(run: RunFile) -> int:
    """N."""
    return -(-_values(run) // max(1, math.prod(sample_shapes(run)[0])))
