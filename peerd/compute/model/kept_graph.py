"""Graph of a forward pass, kept until the gradient of its output comes, so that the backward need not compute it again.

Only a saving of time: whoever has no room for it, or whose parameters have changed since, computes forward again and
gets the same bits. A graph is used once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from peerd.compute.gpu import free_bytes

_FREE_SHARE: Final = 0.25  # of what may be taken of a GPU's memory stays free of graphs


@dataclass(slots=True, eq=False, weakref_slot=True)
class KeptGraph:
    """One forward pass. `era`: of the parameters that it was computed with."""

    x: Tensor  # the input, a leaf of the graph in all stages but the first
    y: Tensor
    era: int
    bytes: int  # about what torch saves for the backward
    used: bool = False


def has_room(device: torch.device, size_bytes: int) -> bool:
    """True where a graph of that size leaves the device enough to compute with; for the CPU its caller keeps count."""
    if device.type != "cuda":
        return True
    free, most = free_bytes(device)
    return free > size_bytes + _FREE_SHARE * most


@dataclass(slots=True)
class GraphBytes:
    """The bytes that torch saves in one forward pass, measured at the first pass of each shape of inputs.

    `shared`: storage that lives anyway, such as the parameters'.
    """

    shared: Callable[[], Tensor]
    _shape: torch.Size | None = None
    bytes: int = 0
    most_bytes: int = 0  # of inputs of any shape

    @contextmanager
    def of(self, x: Tensor) -> Iterator[None]:
        """The scope of one pass; afterwards `bytes` is that of inputs like `x`."""
        if x.shape == self._shape:
            yield
            return
        found: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # torch never frees what such a function saves itself of a graph

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            yield
        found.pop(self.shared().untyped_storage().data_ptr(), None)
        self._shape, self.bytes = x.shape, sum(found.values())
        self.most_bytes = max(self.most_bytes, self.bytes)
