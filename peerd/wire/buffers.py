"""Pool of equally sized buffers that are reused for bulk data.

Allocating and freeing 64 KiB pieces makes the C library return pages to the system and fault them in again, which costs
more than decrypting them. Invariants: a buffer is either in the pool or has exactly one owner; the pool keeps at most
`keep` buffers and drops the others for the garbage collector.
"""

from __future__ import annotations


class BufferPool:
    """A pool of buffers of `size` bytes each."""

    __slots__ = ("_free", "_keep", "size")

    def __init__(self, size: int, keep: int) -> None:
        self.size, self._keep = size, keep
        self._free: list[bytearray] = []

    def take(self) -> bytearray:
        """Return a buffer with arbitrary content. The caller owns it until it calls `give`."""
        return self._free.pop() if self._free else bytearray(self.size)

    def give(self, buffer: object) -> None:
        """Return an unused buffer to the pool. Objects that are not buffers of the pool's size are ignored."""
        if isinstance(buffer, bytearray) and len(buffer) == self.size and len(self._free) < self._keep:
            self._free.append(buffer)
