"""One connection's outgoing frames: what the muxer gives, sealed, as much at once as the connection likes to get.

And the buffers that all connections of a host share for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from peerd.machine.buffers import BufferPool
from peerd.machine.mux.session import YamuxSession
from peerd.machine.secure.noise import PLAIN_BYTES, SEALED_BYTES, Sealer
from peerd.net.transport import LendingLink

Fill = Callable[[memoryview, int], int]  # of a Yamux: frames into a buffer; returns the bytes

BATCH_FRAMES: Final = 8  # full Noise frames sealed and sent at once
_MALLOC_LESSON_BYTES: Final = 16 << 20


class Buffers:
    """Buffers that links of one host share: sealing never waits, and only sending links hold a batch."""

    def __init__(self) -> None:
        self.plain = memoryview(bytearray(PLAIN_BYTES))
        self.received = BufferPool(SEALED_BYTES, keep=256)  # 16 MiB
        self._batches = BufferPool(BATCH_FRAMES * SEALED_BYTES, keep=8)
        # glibc gives memory above twice the largest block ever freed back to the system, and then faults it in again
        # for the next megabyte received. Freeing one large untouched block teaches it to keep what bulk data needs.
        bytes(_MALLOC_LESSON_BYTES)

    def batches(self, alone: bool) -> BufferPool:
        """For batches to be sent, or for such as are one frame: many slow links hold one each for long."""
        return self.received if alone else self._batches


class FrameSealer:
    """Seals for one connection. `plain` may be shared: nothing is left in it."""

    __slots__ = ("_lending", "_plain", "_sealer")

    def __init__(self, sealer: Sealer, plain: memoryview, lending: LendingLink | None) -> None:
        self._sealer, self._plain, self._lending = sealer, plain, lending

    @property
    def alone(self) -> bool:
        """True when a batch is one frame at most, for now."""
        return self._lending is not None and self._lending.batch_bytes < 2 * PLAIN_BYTES

    def batch(self, into: memoryview, fill: Fill, mux: YamuxSession) -> int:
        """Seal what `fill` (of `mux`) gives, up to one batch that fits; returns the bytes written to `into`."""
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
        """One frame with this text."""
        frame = memoryview(bytearray(SEALED_BYTES))
        return bytes(frame[: self._sealer.seal(text, frame)])
