"""Room that a stage takes, from its shapes: memory where it computes and of the machine, and disk.

Counts the most that a stage holds in a step: parameters, the optimizer's moments, the sums of gradients (one more in a
delayed run, with the parameters before the last step), the sum of the last step (`limits.keep_totals`), and, one after
the other, the gradients of a microbatch and the sum that averaging makes of an earlier one. With them go the residuals
of a code that loses something, the parts of a round in messages, and, where the layers are known, the activations of
one microbatch. A checkpoint, or a state for a newcomer, is read piece by piece and takes no memory, unless the next
step comes before it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from peerd.core.model.model_shapes import feed_forward_width, first_with_experts
from peerd.core.run.runfile import OptimizerSection, RunFile

ITEM_BYTES: Final = {"float32": 4, "float64": 8}


_PARTS_UNDER_WAY: Final = 16  # of a round of averaging, in messages
_KEPT_SUMS: Final = 1  # of a group of a grid, while groups join it to others
# Of a code with a residual: that one, the next one, and the gradient with it, or what a further round of a grid misses.
_CODED_VECTORS: Final = 3


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

    @property
    def activation_bytes(self) -> int:
        """Of one microbatch, as the run file has it computed."""
        return self.activations.recomputed if self.recomputes else self.activations.kept

    def on(self, device: str, *, least: bool = False) -> tuple[int, int]:
        """Bytes of the device's own memory and of the machine's. `least`: where layers may be computed again."""
        there = self.device_bytes + (self.activations.recomputed if least else self.activation_bytes)
        return (0, self.machine_bytes + there) if device == "cpu" else (there, self.machine_bytes)


def moment_names(section: OptimizerSection) -> Sequence[str]:
    """Names of the moments that the optimizer keeps for every parameter."""
    if section.name in ("sgd", "lars"):
        return ("momentum",) if section.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def activations_of(run: RunFile, blocks: range, vocab_size: int, last: bool) -> Activations:
    """Of a gpt's stage with these blocks. A test compares with what torch saves.

    In values of a token: a block saves 12 D and 4 F (attention 8 D, both norms and what they feed 4 D, the gate 4 F),
    and D where it is computed again; the head saves 3 D and V, and its backward takes another 2 V.
    """
    m, item_bytes = run.model, ITEM_BYTES[run.model.dtype]
    width, wide = m.d_model, feed_forward_width(m.d_model)
    gated = len(range(max(blocks.start, first_with_experts(run)), blocks.stop))
    whole = (len(blocks) - gated) * (12 * width + 4 * wide) + gated * 12 * width
    largest = 12 * width + 4 * wide if len(blocks) else 0
    head = 3 * width + 3 * vocab_size if last else 0
    tokens = run.pipeline.microbatch * m.context
    again = max(0, len(blocks) - 1) * width + max(largest, head)
    return Activations(tokens * (whole + head) * item_bytes, tokens * again * item_bytes)


def footprint_of(run: RunFile, stage: int, parameters: int, activations: Activations = Activations()) -> StageFootprint:
    """The room that a stage of so many parameters takes."""
    each = parameters * ITEM_BYTES[run.model.dtype]
    moments, delayed, offload = len(moment_names(run.optimizer)), run.optimizer.delayed, run.optimizer.offload
    there = 1 + (2 if delayed else 1) + 1 + (0 if offload else moments)
    here = (1 if run.limits.keep_totals else 0) + (2 if delayed else 0) + (moments if offload else 0)
    here += _KEPT_SUMS + (_CODED_VECTORS if run.averaging.code != "none" else 0)
    parts = min(each, _PARTS_UNDER_WAY * run.averaging.part_bytes)
    return StageFootprint(
        stage,
        parameters,
        there * each,
        here * each + parts,
        (1 + moments) * each,
        activations,
        bool(run.limits.recompute),
    )
