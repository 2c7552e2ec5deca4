"""Reassembly of a striped stream: pieces that arrived out of order, sorted by their offset.

Invariants: pieces do not overlap; the stream's window bounds their number. Hostile input: overlapping pieces or very
many tiny ones raise ProtocolViolation.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from peerd.core.errors import ProtocolViolation
from peerd.core.limits import HELD_PIECE_BYTES, HELD_PIECES
from peerd.wire.rate.delivery_rate import BdpWindow

NOWHERE: Final = -1  # an unknown offset

MERGE_BYTES: Final = 16 * 1024  # small pieces are merged up to this size, so that one-byte pieces cost little

Piece = bytes | bytearray | memoryview


class Reassembly:
    """The out-of-order pieces of one stream, and the offsets of its end and its reset, if known."""

    __slots__ = ("_pieces", "_starts", "bytes", "fin_at", "flight", "reset_at")

    def __init__(self, now: float) -> None:
        self.flight = BdpWindow(now)
        self._starts: list[int] = []  # sorted
        self._pieces: dict[int, Piece] = {}
        self.bytes = 0
        self.fin_at = self.reset_at = NOWHERE

    def put(self, at: int, piece: memoryview, buffer_bytes: int, window_bytes: int) -> bool:
        """Store a slice of a buffer of `buffer_bytes` at offset `at`; returns True if the buffer itself is kept."""
        starts, size = self._starts, len(piece)
        index = bisect_left(starts, at)
        before = self._pieces[starts[index - 1]] if index else b""
        gap = at - (starts[index - 1] + len(before)) if index else 1
        if gap < 0 or (index < len(starts) and at + size > starts[index]):
            raise ProtocolViolation("pieces of a stream overlap")
        self.bytes += size
        if not gap and isinstance(before, bytearray) and len(before) + size <= MERGE_BYTES:
            before += piece
            return False
        most = min(HELD_PIECES, window_bytes // 4 // HELD_PIECE_BYTES)
        if len(starts) >= most:
            raise ProtocolViolation(f"a stream comes in more than {most} scattered pieces")
        ours = size * 2 > buffer_bytes and size > MERGE_BYTES
        starts.insert(index, at)
        self._pieces[at] = piece if ours else bytearray(piece)
        return ours

    def take(self, at: int) -> Piece | None:
        """Remove and return the piece that begins at this offset, or None."""
        piece = self._pieces.pop(at, None)
        if piece is not None:
            del self._starts[0]
            self.bytes -= len(piece)
        return piece

    def drop(self) -> int:
        """Drop all pieces; returns their total bytes."""
        size, self.bytes = self.bytes, 0
        self._starts.clear()
        self._pieces.clear()
        return size

    @property
    def first_at(self) -> int | None:
        return self._starts[0] if self._starts else None
