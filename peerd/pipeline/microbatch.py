"""Data of one microbatch of a trainer on its way through the stages, with the results so far. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from peerd.codec.format.frame import TensorFrame
from peerd.swarm.batch.trainer_ledger import Holding


@dataclass(slots=True)
class Microbatch:
    """One microbatch. Frames: tokens and targets [B, L], of an integer dtype."""

    tokens: TensorFrame
    targets: TensorFrame
    origins: tuple[str, ...] = ()  # where its samples begin in the data, for messages
    loss_sum: float = 0.0  # over the samples
    attempt: int = 0  # number of the next attempt
    holdings: dict[int, Holding] = field(default_factory=dict)  # by stage
    lost: set[int] = field(default_factory=set)  # stages to repeat
    lock: trio.Lock = field(default_factory=trio.Lock)  # held during repeats

    def forget(self) -> None:
        """Reset all results, to begin again from the tokens."""
        self.holdings.clear()
        self.lost.clear()
