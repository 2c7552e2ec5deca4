"""Interface between a layer of experts in torch code and the client that calls experts over the network.

A layer (`experts/model`) scores the coordinates of the grid, requests the live experts with the best scores, and
sends each of them its samples. The layer knows no peers, deadlines or trio; the client knows no tensors, only frames.
`ExpertNetwork` is for trio tasks, `ExpertCaller` for threads, of which many may call concurrently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from peerd.codec.format.frame import TensorFrame
from peerd.run.grid import Uid

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """A call to one expert; `samples` are the indices of its rows in the layer's batch."""

    uid: Uid
    samples: tuple[int, ...]
    frames: tuple[TensorFrame, ...]  # forward: inputs; backward: inputs, then gradients of the outputs
    served: ServedBy | None = None  # backward: the host and weights that answered the forward


@dataclass(frozen=True, slots=True)
class ServedBy:
    """The host that answered a forward, and the version of its weights. The backward is sent to the same host."""

    host: str  # peer id as text
    generation: int
    version: int  # updates that the expert had made


@dataclass(frozen=True, slots=True)
class ExpertReply:
    """An expert's answer: its outputs, or the gradients of its inputs."""

    frame: TensorFrame
    served: ServedBy
    stale: int = 0  # backward: updates by other callers since the forward


class ExpertNetwork(Protocol):
    """Calls to experts, for trio tasks."""

    async def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]:
        """Find the best `k` live experts of each sample by beam search, best first; fewer if fewer are alive.

        `scores`: one float32 array [samples, side] per dimension of the grid.
        """
        ...

    async def forward(self, asks: Sequence[ExpertCall], samples: int) -> list[ExpertReply | None]:
        """Call the experts, with one common deadline. Returns their outputs, None for each that failed or was late.

        Raises `TooFewExperts` if one of the `samples` samples has fewer than `k_min` answers.
        """
        ...

    async def backward(self, asks: Sequence[ExpertCall]) -> list[ExpertReply | None]:
        """Call the experts' backward. Returns the gradients of their inputs; each expert that answers has updated its
        weights. None for an expert that failed: its output counts as a constant.
        """
        ...


class ExpertCaller(Protocol):
    """`ExpertNetwork` for threads: each call blocks until it is done."""

    def choose(self, layer: int, scores: Sequence[np.ndarray], k: int) -> list[list[Uid]]: ...

    def forward(self, asks: Sequence[ExpertCall], samples: int) -> list[ExpertReply | None]: ...

    def backward(self, asks: Sequence[ExpertCall]) -> list[ExpertReply | None]: ...
