"""Bounded dictionary: remembers at most `maxlen` keys, and drops the one that was written longest ago for a new one.

For what strangers can fill: who was met, asked, refused, suspected. Writing a key anew makes it the youngest, reading
it does not (`move_to_end` does). Iteration goes from the oldest to the youngest.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """A dict of at most `maxlen` items, the latest last."""

    def __init__(self, maxlen: int) -> None:
        super().__init__()
        self.maxlen = maxlen

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.maxlen:
            self.popitem(last=False)
