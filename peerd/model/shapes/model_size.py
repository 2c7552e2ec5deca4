"""Sizes of a run's stages, from its run file: parameters, FLOPs, bytes sent, memory, required bandwidth.

Multiply-adds per token: one for each value of each matrix, and `context` x D for attention in each layer (half of the
full square, since it is causal). A multiply-add is two FLOPs, and forward plus backward cost three forwards: 6 N FLOPs
per token for N values in matrices, plus attention. Stages keep their inputs, and activations as far as memory allows
(`limits.activations_mb`); a forward that is computed again for lack of memory is not counted.

The square-cube law (Ryabinin et al., 2023, section 3.1): a layer's work grows with D^2, the bytes it sends with D. So a
stage of twice the width needs half the bandwidth to keep its device busy. Tokens and checksums are not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from peerd.codec.format.blockwise import CODES, SCALE_BYTES, code_bytes, scale_count
from peerd.model.shapes.model_shapes import Shapes, count_of, need_known_sizes, stage_shapes, stage_spans
from peerd.model.shapes.stage_memory import ITEM_BYTES, StageFootprint, activations_of, footprint_of, layer_counts
from peerd.run.runfile import RunFile

_ROUNDED_BYTES: Final = {"bf16": 2, "fp16": 2}
FLOPS_OF_TRAINING: Final = 6  # per multiply-add of a forward: two for the forward, four for the backward


@dataclass(frozen=True, slots=True)
class StageSize:
    """Sizes of one stage. FLOPs and bytes are per microbatch unless stated otherwise."""

    stage: int
    blocks: range
    parameters: int
    layer_parameters: int  # of one block
    flops: int  # forward and backward of the model
    gradient_bytes: int  # that a peer averages per step, as they are sent
    sent_bytes: int  # activations to the next stage; their gradients come back in the same size
    line_bytes: int  # in the busier direction of a peer's connection
    footprint: StageFootprint

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that a peer needs, device memory included."""
        return sum(self.footprint.on("cpu"))

    def saturating_rate(self, speed: float) -> float:
        """Bandwidth in bytes/s, each way, at which a device of `speed` FLOP/s never waits for the network."""
        return self.line_bytes * speed / self.flops


def stage_sizes(run: RunFile, vocab_size: int) -> list[StageSize]:
    """Sizes of each stage of a run. ConfigError for a user's own model, whose sizes only its code knows."""
    need_known_sizes(run)
    return [_size(run, stage, vocab_size) for stage in range(run.pipeline.stages)]


def _size(run: RunFile, stage: int, vocab_size: int) -> StageSize:
    shapes, blocks = stage_shapes(run, stage, vocab_size), stage_spans(run, vocab_size)[stage]
    tokens = run.pipeline.microbatch * run.model.context
    forward = tokens * _multiply_adds(run, shapes, len(blocks))
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
        gradient_bytes=_gradient_bytes(run, shapes),
        sent_bytes=sent,
        line_bytes=sent + got,
        footprint=footprint_of(run, stage, layers, activations_of(run, stage, vocab_size)),
    )


def _multiply_adds(run: RunFile, shapes: Shapes, blocks: int) -> int:
    """Multiply-adds of one token's forward. A shared layer counts once for each of the `blocks`."""
    times = blocks if run.model.share_layers else 1
    matrices = {name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != "embed.table"}
    own = sum(count * (1 if name.startswith("head.") else times) for name, count in matrices.items())
    return own + blocks * run.model.context * run.model.d_model


def boundary_bytes(run: RunFile) -> int:
    """Bytes of a microbatch's activations between two stages, as sent.

    The code `auto`, which depends on the measured bandwidth, counts as uncoded. Savings by lossless compression depend
    on the values and are not counted.
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
    """Number of values that PowerSGD averages for a gradient of this shape: its two factors, or the gradient itself if
    that is smaller.
    """
    if len(shape) < 2:
        return math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return min(min(rank, rows, columns) * (rows + columns), rows * columns)


def microbatches(run: RunFile) -> int:
    """Number of microbatches in a global step."""
    return -(-run.batch.target_samples // run.pipeline.microbatch)
