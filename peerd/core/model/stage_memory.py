"""Room that a stage takes, from the number of its parameters: memory where it computes and of the machine, and disk.

Counts what a stage holds for certain: parameters, the sums of their gradients (one more in a delayed run), one
microbatch's gradients, the optimizer's moments, and the copy of parameters and moments from which a checkpoint is
written. Activations and messages come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from peerd.core.run.runfile import OptimizerSection, RunFile

ITEM_BYTES: Final = {"float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class StageFootprint:
    """Bytes that one stage takes."""

    stage: int
    parameters: int
    device_bytes: int  # where it computes
    machine_bytes: int  # of main memory; on the CPU, that of `device_bytes` besides
    checkpoint_bytes: int

    def on(self, device: str) -> tuple[int, int]:
        """Bytes of the device's own memory and of the machine's."""
        own = 0 if device == "cpu" else self.device_bytes
        return own, self.machine_bytes + self.device_bytes - own


def moment_names(section: OptimizerSection) -> Sequence[str]:
    """Names of the moments that the optimizer keeps for every parameter."""
    if section.name in ("sgd", "lars"):
        return ("momentum",) if section.momentum else ()
    return ("exp_avg", "exp_avg_sq")


def footprint_of(run: RunFile, stage: int, parameters: int) -> StageFootprint:
    """The room that a stage of so many parameters takes."""
    each = parameters * ITEM_BYTES[run.model.dtype]
    moments = len(moment_names(run.optimizer))
    sums = 2 if run.optimizer.delayed else 1
    there = 1 + sums + 1 + (0 if run.optimizer.offload else moments)
    here = 1 + moments + (moments if run.optimizer.offload else 0)
    return StageFootprint(stage, parameters, there * each, here * each, (1 + moments) * each)
