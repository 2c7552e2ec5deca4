"""Load of a trainer: one microbatch on its way through the stages, with what is known of it so far. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from peerd.core.frame import TensorFrame
from peerd.machine.batch.trainer_ledger import Holding


@dataclass(slots=True)
class Microbatch:
    """One microbatch on its way. Frames: tokens int64 [B, L]; inputs and gradients [B, L, D] between stages.

    Inputs and gradients pass the trainer only where it hands them over itself; else it knows who holds what.
    """

    tokens: TensorFrame
    targets: TensorFrame
    origins: tuple[str, ...] = ()  # of its samples: where they begin in the data, for messages
    inputs: dict[int, TensorFrame] = field(default_factory=dict)  # of each stage, as sent
    gradients: dict[int, TensorFrame] = field(default_factory=dict)  # of each stage's output (targets in the last)
    loss_sum: float = 0.0  # over the samples
    attempt: int = 0  # the next one's number
    holdings: dict[int, Holding] = field(default_factory=dict)  # by stage
    lost: set[int] = field(default_factory=set)  # stages that have to be done again
    lock: trio.Lock = field(default_factory=trio.Lock)  # held while some are

    def forget(self) -> None:
        """Begin again from the tokens."""
        self.inputs.clear()
        self.gradients.clear()
        self.holdings.clear()
        self.lost.clear()
