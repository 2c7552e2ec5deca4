"""A state that stands still, for donors in tests."""

from __future__ import annotations

from peerd.messages.state import StateItem, TensorSpec


class Still:
    """A state that nobody changes, read as a frozen one is: in order."""

    def __init__(self, items: list[StateItem]) -> None:
        self._items, self._at = items, (0, 0)
        self.specs = [TensorSpec(item.name, item.dtype, tuple(item.shape)) for item in items]

    def read(self, tensor: int, begin: int, end: int) -> memoryview:
        assert (tensor, begin) >= self._at
        self._at = tensor, end
        return self._items[tensor].payload[begin:end]
