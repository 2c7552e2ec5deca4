"""Encryption of a connection's outgoing frames, in batches of the size that the connection prefers.

Also the buffers that all connections of a host share for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from peerd.wire.buffers import BufferPool
from peerd.wire.noise.noise import PLAIN_BYTES, SEALED_BYTES, Sealer
from peerd.wire.transport import LendingLink
from peerd.wire.yamux.session import YamuxSession

Fill = Callable[[memoryview, int], int]  # YamuxSession.fill: writes frames into a buffer; returns the bytes written

BATCH_FRAMES: Final = 8  # full Noise frames sealed and sent at once
_MALLOC_LESSON_BYTES: Final = 16 << 20


class Buffers:
    """Buffers that the links of one host share. Sealing does not yield, and only sending links hold a batch."""

    def __init__(self) -> None:
        self.plain = memoryview(bytearray(PLAIN_BYTES))
        self.received = BufferPool(SEALED_BYTES, keep=256)  # 16 MiB
        self._batches = BufferPool(BATCH_FRAMES * SEALED_BYTES, keep=8)
        # glibc returns free memory above twice the largest block ever freed to the system, and then page-faults it in
        # again for the next data received. Freeing one large untouched block raises this threshold for bulk data.
        bytes(_MALLOC_LESSON_BYTES)

    def batches(self, alone: bool) -> BufferPool:
        """The pool for batches to send. `alone`: batches of one frame, since many slow links each hold one for long."""
        return self.received if alone else self._batches


class FrameSealer:
    """Encrypts the frames of one connection. `plain` may be shared, since no call leaves data in it."""

    __slots__ = ("_lending", "_plain", "_sealer")

    def __init__(self, sealer: Sealer, plain: memoryview, lending: LendingLink | None) -> None:
        self._sealer, self._plain, self._lending = sealer, plain, lending

    @property
    def alone(self) -> bool:
        """True if a batch currently has at most one frame."""
        return self._lending is not None and self._lending.batch_bytes < 2 * PLAIN_BYTES

    def batch(self, into: memoryview, fill: Fill, mux: YamuxSession) -> int:
        """Encrypt frames from `fill` (of `mux`) into one batch; returns the number of bytes written to `into`."""
        plain, sealer = self._plain, self._sealer
        at, left = 0, min(BATCH_FRAMES, len(into) // SEALED_BYTES)
        if self._lending is not None and (lot := self._lending.batch_bytes) < left * PLAIN_BYTES:
            left, plain = max(1, lot // PLAIN_BYTES), plain[:lot]
        while left and (size := fill(plain, (left - 1) * PLAIN_BYTES)):
            at += sealer.seal(plain[:size], into[at:])
            left -= 1
            if (spill := mux.spill) is not None:
                for begin in range(0, len(spill), PLAIN_BYTES):
                    at += sealer.seal(spill[begin : begin + PLAIN_BYTES], into[at:])
                    left -= 1
        return at

    def one(self, text: bytes) -> bytes:
        """Encrypt one frame with this content."""
        frame = memoryview(bytearray(SEALED_BYTES))
        return bytes(frame[: self._sealer.seal(text, frame)])
