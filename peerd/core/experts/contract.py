"""Contract between a layer of experts in torch code and the peer that carries its calls.

A layer (`compute/experts`) scores the coordinates of the grid, has the live experts with the best scores chosen, and
sends each of them the samples that it has for it. It knows no peers, no deadlines and no trio; whoever carries its
calls knows no tensors, only frames. `ExpertNetwork` is used from trio tasks, `ExpertCaller` from plain threads, which
may be many at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from peerd.core.experts.grid import Uid
from peerd.core.frame import TensorFrame

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class ExpertAsk:
    """One call for one expert: `samples` are the numbers of its rows in the layer's batch."""

    uid: Uid
    samples: tuple[int, ...]
    frames: tuple[TensorFrame, ...]  # forward: inputs; backward: inputs, then gradients of the outputs
    served: Served | None = None  # backward: what answered the forward


@dataclass(frozen=True, slots=True)
class Served:
    """Whoever answered a forward, and with which weights: the backward goes there, too."""

    host: str  # peer id as text
    generation: int
    version: int  # updates that the expert had made


@dataclass(frozen=True, slots=True)
class ExpertReply:
    """An expert's answer: outputs, or gradients of the inputs."""

    frame: TensorFrame
    served: Served
    stale: int = 0  # backward: updates that others made since the forward


class ExpertNetwork(Protocol):
    """Calls to experts, for trio tasks."""

    async def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]:
        """The best `k` live experts of each sample, best first, by beam search; fewer where fewer live.

        `scores`: for each dimension of the grid, the scores [samples, side] as float32.
        """
        ...

    async def forward(self, asks: Sequence[ExpertAsk], samples: int) -> list[ExpertReply | None]:
        """The experts' outputs, None for those that failed or came late; one deadline for all.

        Raises `TooFewExperts` when one of the `samples` samples has fewer than `k_min` answers.
        """
        ...

    async def backward(self, asks: Sequence[ExpertAsk]) -> list[ExpertReply | None]:
        """Gradients of the inputs; each expert that answers has made an update. None: it counts as a constant."""
        ...


class ExpertCaller(Protocol):
    """The same for plain threads: each call blocks its thread until it is done."""

    def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]: ...

    def forward(self, asks: Sequence[ExpertAsk], samples: int) -> list[ExpertReply | None]: ...

    def backward(self, asks: Sequence[ExpertAsk]) -> list[ExpertReply | None]: ...
