"""Sizes of a run's stages, from its run file: parameters, FLOPs, bytes, memory, line.

Multiply-adds of a token: one for each value of a matrix that it passes, and of attention `context` x D in each layer
(half of the square, for it is causal). A FLOP is half a multiply-add; forward and backward together are three forwards:
so 6 N FLOPs a token for N values in matrices, besides attention. Where the trainer carries tensors from stage to stage,
a stage keeps no activations: each but the last, which has a backward alone, computes its forward twice and gets its
input twice.

The square-cube law (Ryabinin et al., 2023, section 3.1): the work of a layer grows with D^2, what it sends with D, so a
stage of twice the width needs half the line to keep its device busy. Tokens and checksums are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from peerd.core.blockwise import CODES, SCALE_BYTES, code_bytes, scale_count
from peerd.core.model.model_shapes import Shapes, count_of, need_known_sizes, stage_shapes, stage_spans
from peerd.core.model.stage_memory import ITEM_BYTES, StageFootprint, activations_of, footprint_of, layer_counts
from peerd.core.run.runfile import RunFile

_ROUNDED_BYTES: Final = {"bf16": 2, "fp16": 2}
FLOPS_OF_TRAINING: Final = 6  # of each multiply-add of a forward: two for it, four for its backward
FLOPS_AGAIN: Final = 2  # for the forward that is computed anew for the backward


@dataclass(frozen=True, slots=True)
class StageSize:
    """One stage. FLOPs and bytes are those of a microbatch where not said otherwise."""

    stage: int
    blocks: range
    parameters: int
    layer_parameters: int  # of one of its blocks
    flops: int  # forward and backward of the model
    work_flops: int  # what a peer of the stage computes: the forward that it repeats, too
    gradient_bytes: int  # that a peer averages in a step
    sent_bytes: int  # activations to the next stage; as many come back
    line_bytes: int  # in the busier direction of a peer's line
    footprint: StageFootprint

    @property
    def memory_bytes(self) -> int:
        """Memory that a peer needs, a device's own included."""
        return sum(self.footprint.on("cpu"))

    def saturating_rate(self, speed: float) -> float:
        """Bytes a second, each way, of the line with which a device of `speed` FLOP/s never waits for it."""
        return self.line_bytes * speed / self.work_flops


def stage_sizes(run: RunFile, vocab_size: int) -> list[StageSize]:
    """Each stage of a run; ConfigError where only the user's code knows."""
    need_known_sizes(run)
    return [_size(run, stage, vocab_size) for stage in range(run.pipeline.stages)]


def _size(run: RunFile, stage: int, vocab_size: int) -> StageSize:
    shapes, blocks = stage_shapes(run, stage, vocab_size), stage_spans(run, vocab_size)[stage]
    tokens = run.pipeline.microbatch * run.model.context
    forward = tokens * _multiply_adds(run, shapes, len(blocks))
    again = computes_again(run, stage)
    sent = 0 if stage == run.pipeline.stages - 1 else boundary_bytes(run)
    got = 0 if stage == 0 else boundary_bytes(run)
    own = {name: shape for name, shape in shapes.items() if name.startswith(f"block{blocks.start}.")}
    layers = layer_counts({name: math.prod(shape) for name, shape in shapes.items()})
    return StageSize(
        stage=stage,
        blocks=blocks,
        parameters=count_of(shapes),
        layer_parameters=count_of(own),
        flops=FLOPS_OF_TRAINING * forward,
        work_flops=(FLOPS_OF_TRAINING + (FLOPS_AGAIN if again else 0)) * forward,
        gradient_bytes=_gradient_bytes(run, shapes),
        sent_bytes=sent,
        line_bytes=sent + got * (2 if again else 1),
        footprint=footprint_of(run, stage, layers, activations_of(run, stage, vocab_size)),
    )


def _multiply_adds(run: RunFile, shapes: Shapes, blocks: int) -> int:
    """Of one token's forward; a shared layer is passed once for each block that it stands for."""
    times = blocks if run.model.share_layers else 1
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != "embed.table"}
    own = sum(count * (1 if name.startswith("head.") else times) for name, count in matrices.items())
    return own + blocks * run.model.context * run.model.d_model


def computes_again(run: RunFile, stage: int) -> bool:
    """True if a stage gets its input twice and computes its forward again for the backward.

    So it is where the trainer carries tensors from stage to stage, but for the last stage, which computes both in one
    call. Stages that hand over to each other keep their inputs, and computed layers as far as memory allows
    (`limits.activations_mb`).
    """
    return run.pipeline.handover == "trainer" and stage < run.pipeline.stages - 1


def boundary_bytes(run: RunFile) -> int:
    """Activations of a microbatch as they travel over a boundary of two stages. `auto`, which depends on the line,
    counts as not coded; what lossless packing saves is not known before.
    """
    values = run.pipeline.microbatch * run.model.context * run.model.d_model
    boundary = run.pipeline.boundary
    return _coded_bytes(values, boundary.code, boundary.block, ITEM_BYTES[run.model.dtype])


def _coded_bytes(values: int, code: str, block: int, item_bytes: int) -> int:
    if code in CODES:
        return code_bytes(values, code) + SCALE_BYTES * scale_count(values, block or CODES[code].block)
    return values * _ROUNDED_BYTES.get(code, item_bytes)


def _gradient_bytes(run: RunFile, shapes: Shapes) -> int:
    averaging, item_bytes = run.averaging, ITEM_BYTES[run.model.dtype]
    if averaging.code != "powersgd":
        return _coded_bytes(count_of(shapes), averaging.code, averaging.block, item_bytes)
    return item_bytes * sum(factored_values(shape, averaging.rank) for shape in shapes.values())


def factored_values(shape: tuple[int, ...], rank: int) -> int:
    """Values of a gradient of this shape that PowerSGD averages: its two factors, or itself where it is smaller."""
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return min(min(rank, rows, columns) * (rows + columns), rows * columns)


def microbatches(run: RunFile) -> int:
    """Microbatches of a global step."""
    return -(-run.batch.target_samples // run.pipeline.microbatch)
