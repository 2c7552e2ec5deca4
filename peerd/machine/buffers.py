"""A pool of equal buffers, so that bulk data lives in memory that is already there.

Allocating and freeing 64 KiB pieces makes the C library hand pages back to the system and fault them in again, which
costs more than decrypting them. Invariants: a buffer is in the pool or with one owner; the pool keeps at most
`keep`, the rest goes to the garbage collector.
"""

from __future__ import annotations


class BufferPool:
    """Buffers of `size` bytes."""

    __slots__ = ("_free", "_keep", "size")

    def __init__(self, size: int, keep: int) -> None:
        self.size, self._keep = size, keep
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        """A buffer with any content, whose owner the caller becomes."""
        return self._free.pop() if self._free else bytearray(self.size)

    def give(self, buffer: object) -> None:
        """Take back a buffer that nobody looks at any more; anything that is not one of ours is ignored."""
        if isinstance(buffer, bytearray) and len(buffer) == self.size and len(self._free) < self._keep:
            self._free.append(buffer)
