"""Autograd graph of a forward pass, kept until the output's gradient arrives, so that the backward need not recompute
it.

This only saves time: without memory for the graph, or if the parameters have changed since, the forward is computed
again and gives the same bits. A graph is used once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from peerd.codec.gpu import free_bytes

_FREE_SHARE: Final = 0.25  # of a GPU's usable memory that stays free of graphs


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptGraph:
    """Graph of one forward pass. `era`: version of the parameters that computed it."""

    x: Tensor  # the input; a leaf of the graph, except in the first stage
    y: Tensor
    era: int
    bytes: int  # approximate size of what torch saves for the backward
    used: bool = False


def has_room(device: torch.device, size_bytes: int) -> bool:
    """True if a graph of `size_bytes` leaves the GPU enough memory to compute. Always true on a CPU, where the caller
    limits the bytes of its graphs.
    """
    if device.type != "cuda":
        return True
    free, most = free_bytes(device)
    return free > size_bytes + _FREE_SHARE * most


@dataclass(slots=True)
class GraphBytes:
    """Bytes that torch saves in one forward pass, measured at the first pass of each input shape.

    `shared`: returns a tensor whose storage exists anyway, such as the parameters', and is not counted.
    """

    shared: Callable[[], Tensor]
    _shape: torch.Size | None = None
    bytes: int = 0
    most_bytes: int = 0  # maximum over all input shapes

    @contextmanager
    def of(self, x: Tensor) -> Iterator[None]:
        """Measure the pass inside this context; afterwards `bytes` is the size for inputs like `x`."""
        if x.shape == self._shape:
            yield
            return
        found: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # detached: torch never frees graph tensors that a pack hook returns

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        found.pop(self.shared().untyped_storage().data_ptr(), None)
        self._shape, self.bytes = x.shape, sum(found.values())
        self.most_bytes = max(self.most_bytes, self.bytes)
