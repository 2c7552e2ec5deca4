"""Memory and disk that a stage needs, from its shapes: on the device that computes, in main memory, and on disk.

Counts the peak of a step:
- parameters, and the optimizer's moments;
- the accumulated gradients; in a delayed run, a second such sum and the parameters before the last step;
- the summed gradient of the last step (`limits.keep_totals`);
- the larger of a microbatch's gradients and averaging's result, which are never held together. If the stage averages in
  a grid of groups (`averaging.group_size`, or chosen by the conductor for many members), also an earlier round's sum;
- with a lossy code, the gradient plus residual, and the last and the next residual unless they are in files;
- the parts of an averaging round that are in messages;
- the activations of one microbatch: of a gpt in `RunFile.precision`; those of a user's own layers are measured
  (`model/stage/footprint`);
- in a run with experts, the microbatches in flight (`trunk_memory`).

A checkpoint, or a state for a newcomer, is read piece by piece and takes no extra memory. If the next step starts
before all of it is read, the rest is copied to a file. A small remainder, without `limits.memory_gb`, is copied to
memory; it is not counted here. With `limits.offload` all of this is in main memory: a GPU then holds only copies of two
consecutive layers, the gradient of one of them, and the activations of recomputed layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from peerd.core.limits import WORTH_A_FILE_BYTES
from peerd.model.shapes.model_shapes import feed_forward_width, first_with_experts, stage_shapes, stage_spans
from peerd.model.shapes.trunk_memory import NO_FLIGHTS, FlightMemory, flight_memory
from peerd.run.runfile import OptimizerSection, RunFile

ITEM_BYTES: Final = {"float32": 4, "float64": 8}
LOSS_VALUES: Final = 3  # per logit while the loss is computed: its log-probability, and two gradients

_HALF_BYTES: Final = 2
_PARTS_UNDER_WAY: Final = 16  # of an averaging round, in messages
_KEPT_SUMS: Final = 1  # of a group in a grid, while it is averaged with other groups
_CODED_VECTORS: Final = 1  # of a lossy code: the gradient plus residual
_RESIDUALS: Final = 2  # of a lossy code: the last one and the next one; large ones are in files, except with powersgd


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of activations that torch saves in a microbatch's forward for its backward."""

    kept: int = 0
    recomputed: int = 0  # if layers are recomputed in the backward (activation checkpointing)


@dataclass(frozen=True, slots=True)
class StageFootprint:
    """Bytes that one stage needs; `device_bytes` and `machine_bytes` do not include activations."""

    stage: int
    parameters: int
    device_bytes: int  # on the device that computes
    machine_bytes: int  # of main memory; on the CPU, in addition to `device_bytes`
    checkpoint_bytes: int
    activations: Activations = Activations()
    recomputes: bool = False  # `limits.recompute`
    copies_bytes: int = 0  # on a GPU, with `limits.offload`
    offload: bool = False  # `limits.offload`; has no effect on the CPU
    flights: FlightMemory = NO_FLIGHTS  # of a run with experts

    def held(self, device: str, *, least: bool = False) -> tuple[int, int]:
        """Bytes of device memory and of main memory, without activations.

        With `least`, only one microbatch counts as in flight.
        """
        flights = self.flights.least if least else self.flights.most
        there, here = self.device_bytes + flights.device, self.machine_bytes + flights.machine
        if device != "cpu" and not self.offload:
            return there, here
        return (0 if device == "cpu" else self.copies_bytes), here + there

    def activation_bytes(self, device: str) -> int:
        """Bytes of one microbatch's activations, with or without recomputation as the run file says."""
        again = self.recomputes or (self.offload and device != "cpu")
        return self.activations.recomputed if again else self.activations.kept

    def on(self, device: str, *, least: bool = False) -> tuple[int, int]:
        """Bytes of device memory and of main memory, with the activations of one microbatch.

        With `least`, layers count as recomputed, and only one microbatch counts as in flight.
        """
        there, here = self.held(device, least=least)
        activations = self.activations.recomputed if least else self.activation_bytes(device)
        return (there, here + activations) if device == "cpu" else (there + activations, here)


def moment_names(section: OptimizerSection) -> Sequence[str]:
    """Names of the moments that the optimizer keeps for each parameter."""
    if section.name in ("sgd", "lars"):
        return ("momentum",) if section.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def activations_of(run: RunFile, stage: int, vocab_size: int) -> Activations:
    """Bytes of one microbatch's activations in a gpt's stage. A test compares them with what torch saves.

    Values per token: a block saves 12 D + 4 F (4 D: the two norms' inputs and scaled inputs; 8 D: inputs and outputs of
    attention's matrices; 4 F: the gated feed-forward), or D if it is recomputed. The head saves 3 D + V, and its
    backward needs another 2 V. In 16-bit precision the inputs and outputs of matrices take 2 bytes each, and a copy of
    each matrix is kept until the backward is done, also if layers are recomputed.
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
    """Number of values in the matrices that a stage of a gpt multiplies with."""
    shapes = stage_shapes(run, stage, vocab_size)
    return sum(math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != "embed.table")


def footprint_of(
    run: RunFile, stage: int, layers: Sequence[int], activations: Activations = Activations()
) -> StageFootprint:
    """The footprint of a stage; `layers` is the number of parameters of each of its layers."""
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
    """Number of vectors in memory that averaging's code needs in addition; 0 without a code."""
    if run.averaging.code == "none":
        return 0
    in_files = run.averaging.code != "powersgd" and vector_bytes >= WORTH_A_FILE_BYTES
    return _CODED_VECTORS + (0 if in_files else _RESIDUALS)


def layer_counts(parameters: Mapping[str, int]) -> list[int]:
    """Number of parameters of each layer, from the size of each tensor by name, such as `block3.feed.up.weight`."""
    counts: dict[str, int] = {}
    for name, count in parameters.items():
        layer = name.partition(".")[0]
        counts[layer] = counts.get(layer, 0) + count
    return list(counts.values())


def _copied(layers: Sequence[int]) -> int:
    """The most values that copies of two consecutive layers and the gradient of one of them take."""
    pairs = itertools.pairwise(layers) if len(layers) > 1 else [(one, 0) for one in layers]
    return max((one + other + max(one, other) for one, other in pairs), default=0)
