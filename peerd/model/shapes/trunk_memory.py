"""Memory of the microbatches that a trainer of a run with experts has in flight: their number, and what each keeps.

For each layer of experts, a microbatch keeps the outputs of its segment, the experts' answers, and the messages that
carried both. In its backward pass it also keeps the gradients of the trunk computed so far. With an asynchronous
trunk, gradients of completed microbatches wait for a place in a batch, and the trunk keeps a copy of its parameters for
each earlier step at which a microbatch in flight began. Messages of experts count with their size before coding.

Shapes: B samples of text, L tokens, D d_model; N samples of the experts, K experts for each, G places in all dimensions
of their grid together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from peerd.run.grid import grid_of, sample_shapes
from peerd.run.runfile import ExpertsSection, RunFile

IN_FLIGHT: Final = 64  # microbatches at once by default; most of their time is waiting for answers
GRADIENT_BYTES: Final = 1 << 30  # default for gradients in flight, and limit for those that wait for a place

_WIRE_BYTES: Final = {"float32": 4, "bfloat16": 2}
_INDEX_BYTES: Final = 8
_CALL_BYTES: Final = 80  # per sample of a call: its position, in tensors and in Python lists


class DeviceAndMachine(NamedTuple):
    """Bytes of memory on the trunk's device, and of main memory in addition."""

    device: int
    machine: int


@dataclass(frozen=True, slots=True)
class FlightMemory:
    """Bytes that microbatches in flight take. `least`: with one microbatch at a time, and no copy of parameters."""

    flights: int
    copies: int  # of the trunk's parameters of earlier steps
    most: DeviceAndMachine
    least: DeviceAndMachine


NO_FLIGHTS: Final = FlightMemory(0, 0, DeviceAndMachine(0, 0), DeviceAndMachine(0, 0))


def flights_at_once(run: RunFile, trunk_bytes: int) -> int:
    """Most microbatches that one trainer has in flight, if the batch has enough places."""
    return run.limits.microbatches_in_flight or min(IN_FLIGHT, gradients_in_memory(trunk_bytes))


def gradients_in_memory(trunk_bytes: int) -> int:
    """Number of gradients of a trunk of this size that fit into GRADIENT_BYTES, at least 1."""
    return max(1, GRADIENT_BYTES // max(1, trunk_bytes))


def places_at_once(run: RunFile) -> int:
    """Number of places in one batch of the trunk."""
    return max(1, run.batch.target_samples // run.pipeline.microbatch)


def flight_memory(run: RunFile, trunk_bytes: int, item_bytes: int) -> FlightMemory:
    """Memory of the microbatches that one trainer has in flight. `item_bytes`: bytes of one value of the trunk."""
    flights, places = flights_at_once(run, trunk_bytes), places_at_once(run)
    copies = queued = 0
    if run.optimizer.asynchronous:
        copies = min(flights, run.optimizer.most_stale + 1)  # one more during a step
        queued = min(places, gradients_in_memory(trunk_bytes))
    else:
        flights = min(flights, places * (2 if run.optimizer.delayed else 1))
    each, job = _flight_bytes(run, item_bytes), _job_bytes(run, item_bytes)
    device = each.device + trunk_bytes
    most = DeviceAndMachine(flights * device + (copies + queued) * trunk_bytes + job, flights * each.machine)
    return FlightMemory(flights, copies, most, DeviceAndMachine(device + job, each.machine))


def _flight_bytes(run: RunFile, item_bytes: int) -> DeviceAndMachine:
    """Bytes of a microbatch that waits for the last answers of its backward, without gradients of parameters."""
    section, grid, values, samples = run.experts or ExpertsSection(), grid_of(run), _values(run), _samples(run)
    ends = (2 * values + samples * sum(grid.sides)) * item_bytes  # residual, samples and scores of a junction
    indexes = samples * section.top_k * (_INDEX_BYTES * len(grid.sides) + 2)
    layer = ends + section.top_k * values * item_bytes + indexes
    texts = 2 * _INDEX_BYTES * run.pipeline.microbatch * run.model.context
    messages = 2 * section.top_k * values * _WIRE_BYTES[section.dtype]  # calls and replies
    calls = samples * section.top_k * _CALL_BYTES
    return DeviceAndMachine(grid.layers * layer + ends + texts, grid.layers * (messages + calls) + messages)


def _job_bytes(run: RunFile, item_bytes: int) -> int:
    """Bytes of the answers and their gradients while one segment is computed."""
    return 2 * (run.experts or ExpertsSection()).top_k * _values(run) * item_bytes


def _values(run: RunFile) -> int:
    """B x L x D, the number of values in all samples of one layer of experts."""
    return run.pipeline.microbatch * run.model.context * run.model.d_model


def _samples(run: RunFile) -> int:
    """N, the number of samples that one layer of experts processes for one microbatch."""
    return -(-_values(run) // max(1, math.prod(sample_shapes(run)[0])))
