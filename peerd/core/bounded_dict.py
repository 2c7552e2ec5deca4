"""Bounded dictionary: holds at most `maxlen` keys, and evicts the key that was written longest ago.

For tables that strangers can fill, such as peers that were seen, asked or refused. Writing a key makes it the newest;
reading does not (`move_to_end` does). Iteration is from the oldest to the newest.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(OrderedDict[K, V]):
    """A dict of at most `maxlen` items, the newest last."""

    def __init__(self, maxlen: int) -> None:
        super().__init__()
        self.maxlen = maxlen

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.maxlen:
            self.popitem(last=False)
