"""Room that a stage takes, from its shapes: memory where it computes and of the machine, and disk.

Counts the most that a stage holds in a step: parameters, the optimizer's moments, the sums of gradients (one more in a
delayed run, with the parameters before the last step), the sum of the last step (`limits.keep_totals`), and, one after
the other, the gradients of a microbatch and the sum that averaging makes (in grids of `averaging.group_size` that of an
earlier round as well; a grid that the conductor chooses for many members takes it, too). With them go the gradient with
what a code missed before, the residuals of such a code unless they lie in files, the parts of a round in messages, and
the activations of one microbatch: of a gpt as it is computed here, in `RunFile.precision`; those of a user's own layers
are measured (`compute/model/footprint`). A checkpoint, or a state for a newcomer, is read piece by piece and takes no
memory. What is left of it when the next step comes is copied: to a file with `limits.memory_gb`, else to memory, which
is not counted here. A run with experts has many microbatches under way besides (`trunk_memory`).

With `limits.offload` all of that is in the machine's memory. A device with memory of its own holds copies of two layers
that follow each other, the gradient of one of them, and activations of layers that are computed again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from peerd.core.limits import WORTH_A_FILE_BYTES
from peerd.core.model.model_shapes import feed_forward_width, first_with_experts, stage_shapes, stage_spans
from peerd.core.model.trunk_memory import NO_FLIGHTS, FlightMemory, flight_memory
from peerd.core.run.runfile import OptimizerSection, RunFile

ITEM_BYTES: Final = {"float32": 4, "float64": 8}
LOSS_VALUES: Final = 3  # of a score, while the loss of it is computed: its logarithm, and two gradients

_HALF_BYTES: Final = 2
_PARTS_UNDER_WAY: Final = 16  # of a round of averaging, in messages
_KEPT_SUMS: Final = 1  # of a group of a grid, while groups join it to others
_CODED_VECTORS: Final = 1  # of a code that loses something: the gradient with the residual added
_RESIDUALS: Final = 2  # of such a code, the last one and the next one; large ones of blocks lie in files


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of what torch keeps of a microbatch's forward for its backward."""

    kept: int = 0
    recomputed: int = 0  # where layers are computed again


@dataclass(frozen=True, slots=True)
class StageFootprint:
    """Bytes that one stage takes; `device_bytes` and `machine_bytes` are those beside activations."""

    stage: int
    parameters: int
    device_bytes: int  # where it computes
    machine_bytes: int  # of main memory; on the CPU, that of `device_bytes` besides
    checkpoint_bytes: int
    activations: Activations = Activations()
    recomputes: bool = False  # by the run file
    copies_bytes: int = 0  # on a device with memory of its own, with `limits.offload`
    offload: bool = False  # by the run file; it changes nothing on the CPU
    flights: FlightMemory = NO_FLIGHTS

    def held(self, device: str, *, least: bool = False) -> tuple[int, int]:
        """Bytes of the device's own memory and of the machine's, without activations. `least`: with one microbatch
        under way.
        """
        flights = self.flights.least if least else self.flights.most
        there, here = self.device_bytes + flights.device, self.machine_bytes + flights.machine
        if device != "cpu" and not self.offload:
            return there, here
        return (0 if device == "cpu" else self.copies_bytes), here + there

    def activation_bytes(self, device: str) -> int:
        """Of one microbatch, as the run file has it computed."""
        again = self.recomputes or (self.offload and device != "cpu")
        return self.activations.recomputed if again else self.activations.kept

    def on(self, device: str, *, least: bool = False) -> tuple[int, int]:
        """Bytes of the device's own memory and of the machine's, with the activations of one microbatch. `least`: where
        layers may be computed again, and only one microbatch is under way.
        """
        there, here = self.held(device, least=least)
        activations = self.activations.recomputed if least else self.activation_bytes(device)
        return (there, here + activations) if device == "cpu" else (there + activations, here)


def moment_names(section: OptimizerSection) -> Sequence[str]:
    """Names of the moments that the optimizer keeps for every parameter."""
    if section.name in ("sgd", "lars"):
        return ("momentum",) if section.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def activations_of(run: RunFile, stage: int, vocab_size: int) -> Activations:
    """Of a gpt's stage. A test compares with what torch saves.

    In values of a token: a block saves 12 D and 4 F (each norm what it gets and that scaled, 4 D; attention what goes
    into its matrices and comes out of them, 8 D; the gate 4 F), and D where it is computed again; the head saves 3 D
    and V, and its backward takes another 2 V. In 16 bits so does what goes into matrices and comes out of them, and a
    copy of each matrix is kept until the backward is done, also where layers are computed again.
    """
    m, item_bytes, full = run.model, ITEM_BYTES[run.model.dtype], run.precision == "full"
    short_bytes = item_bytes if full else _HALF_BYTES
    width, wide = m.d_model, feed_forward_width(m.d_model)
    blocks = stage_spans(run, vocab_size)[stage]
    gated = len(range(max(blocks.start, first_with_experts(run)), blocks.stop))
    attention, feed = (4 * item_bytes + 8 * short_bytes) * width, 4 * wide * short_bytes
    whole = len(blocks) * attention + (len(blocks) - gated) * feed
    last = stage == run.pipeline.stages - 1
    head = (2 * item_bytes + short_bytes) * width + LOSS_VALUES * item_bytes * vocab_size if last else 0
    again = max(0, len(blocks) - 1) * width * item_bytes + max(attention + feed if len(blocks) else 0, head)
    copies = 0 if full else _HALF_BYTES * _matrix_values(run, stage, vocab_size)
    tokens = run.pipeline.microbatch * m.context
    return Activations(tokens * (whole + head) + copies, tokens * again + copies)


def _matrix_values(run: RunFile, stage: int, vocab_size: int) -> int:
    """Values in the matrices that a stage of a gpt multiplies with."""
    shapes = stage_shapes(run, stage, vocab_size)
    return sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != "embed.table")


def footprint_of(
    run: RunFile, stage: int, layers: Sequence[int], activations: Activations = Activations()
) -> StageFootprint:
    """The room that a stage takes, whose layers have so many parameters."""
    parameters, item_bytes = sum(layers), ITEM_BYTES[run.model.dtype]
    each = parameters * item_bytes
    moments, delayed, offload = len(moment_names(run.optimizer)), run.optimizer.delayed, run.optimizer.offload
    there = 1 + (2 if delayed else 1) + 1 + (0 if offload else moments)
    here = (1 if run.limits.keep_totals else 0) + (2 if delayed else 0) + (moments if offload else 0)
    here += (_KEPT_SUMS if run.averaging.group_size else 0) + _coded_vectors(run, each)
    parts = min(each, _PARTS_UNDER_WAY * run.averaging.part_bytes)
    return StageFootprint(
        stage,
        parameters,
        there * each,
        here * each + parts,
        (1 + moments) * each,
        activations,
        bool(run.limits.recompute),
        _copied(layers) * item_bytes,
        run.limits.offload,
        flight_memory(run, each, item_bytes) if run.experts is not None else NO_FLIGHTS,
    )


def _coded_vectors(run: RunFile, vector_bytes: int) -> int:
    """Vectors that the code of averaging has in memory beside what a round without one has."""
    if run.averaging.code == "none":
        return 0
    in_files = run.averaging.code != "powersgd" and vector_bytes >= WORTH_A_FILE_BYTES
    return _CODED_VECTORS + (0 if in_files else _RESIDUALS)


def layer_counts(parameters: Mapping[str, int]) -> list[int]:
    """Parameters of each layer, from those of each tensor by its name in the model, `block3.feed.up.weight`."""
    counts: dict[str, int] = {}
    for name, count in parameters.items():
        layer = name.partition(".")[0]
        counts[layer] = counts.get(layer, 0) + count
    return list(counts.values())


def _copied(layers: Sequence[int]) -> int:
    """The most values on a device that has copies of two layers that follow each other, and a gradient of one."""
    pairs = itertools.pairwise(layers) if len(layers) > 1 else [(one, 0) for one in layers]
    return max((one + other + max(one, other) for one, other in pairs), default=0)
