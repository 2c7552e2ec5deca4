"""Streams whose data travels on several connections at once: frames that name their place, and putting them in order.

A link may have further connections, called rails (`net.rails`). A stream with much to send is striped: from then on
its data frames say at which byte of the stream they belong, and go out on whichever rail has room; resets and ends
name their place, too. Each connection is parsed by itself, and only streams that use it wait for it: a lost packet of
bulk data delays no small call.

Invariants: what is held ahead of its turn counts as received against the stream's window, so that the window bounds it,
and what keeping the pieces costs is bounded by it, too; pieces neither overlap nor lie beyond the window.
Hostile input: overlapping, far-off or countless tiny pieces, places behind what was read, marks before the data, frames
of another kind on a rail: all raise ProtocolViolation.
Wire: a frame of yamux's form with type PLACED, whose 12 bytes are followed by the place (u64, big-endian) and `length`
bytes. Flags: FIN, RST, or none.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import Final

from peerd.core.errors import ProtocolViolation
from peerd.core.limits import HELD_PIECE_BYTES, HELD_PIECES
from peerd.machine.buffers import BufferPool
from peerd.machine.flight import Flight
from peerd.machine.yamux_stream import MERGE_BYTES, Piece, YamuxStream

PROTOCOL: Final = "/peerd/rail/1"  # takes a muxer's place in the hand-shake of a further connection
PLACED: Final = 4  # frame type, after yamux's own
PLACE: Final = struct.Struct(">Q")
PLACED_HEADER: Final = struct.Struct(">BBHIIQ")
BINDING_BYTES: Final = 32
_NOWHERE: Final = -1


class Lane:
    """One connection's incoming frames: where in a frame its bytes stand."""

    __slots__ = ("at", "ended", "fin", "head", "left", "main", "stream")

    def __init__(self, *, main: bool) -> None:
        self.main = main  # the link's first connection: carries everything
        self.ended = False  # the peer sends nothing more here
        self.head = bytearray()  # of a frame whose header is incomplete
        self.left = 0  # payload bytes of the current data frame still to come
        self.at = _NOWHERE  # the next one's place in its stream; -1: they come in order
        self.stream: YamuxStream | None = None  # None: the payload is thrown away
        self.fin = False

    def place(self, size: int) -> memoryview | None:
        """Where a reader waits for the next `size` bytes of plaintext; None: nobody does. What comes next is that."""
        stream = self.stream
        if stream is None or size > self.left or self.at not in (_NOWHERE, stream.received_bytes):
            return None
        return stream.place(size)

    def row(self) -> int:
        """How many bytes of plaintext `place` has room for, all data of one frame."""
        stream = self.stream
        if stream is None or stream.landing is None or self.at not in (_NOWHERE, stream.received_bytes):
            return 0
        return min(self.left, len(stream.landing))


class Held:
    """Pieces of one stream that came before their turn, and where it ends if that is known."""

    __slots__ = ("_pieces", "_starts", "bytes", "fin_at", "flight", "reset_at")

    def __init__(self, now: float) -> None:
        self.flight = Flight(now)
        self._starts: list[int] = []  # sorted
        self._pieces: dict[int, Piece] = {}
        self.bytes = 0
        self.fin_at = self.reset_at = _NOWHERE

    def put(self, at: int, piece: memoryview, buffer_bytes: int, window_bytes: int) -> bool:
        """Keep a slice of a buffer of so many bytes; whether that buffer is ours now."""
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
        """The piece that begins there, if it has come."""
        piece = self._pieces.pop(at, None)
        if piece is not None:
            del self._starts[0]
            self.bytes -= len(piece)
        return piece

    def drop(self) -> int:
        """Forget all pieces; returns their bytes."""
        size, self.bytes = self.bytes, 0
        self._starts.clear()
        self._pieces.clear()
        return size

    @property
    def first_at(self) -> int | None:
        return self._starts[0] if self._starts else None


def check_place(stream: YamuxStream, held: Held, at: int, length: int) -> None:
    """ProtocolViolation when bytes at `at` were there before, or lie beyond all that was ever granted."""
    behind = at < stream.received_bytes and not stream.abandoned
    if behind or at + length > stream.received_bytes + held.bytes + stream.credit:
        raise ProtocolViolation(f"stream {stream.id} sends {length} bytes at {at}, which is not in its window")


def release(stream: YamuxStream, held: Held, pool: BufferPool) -> None:
    """Give the stream the pieces whose turn has come."""
    while (piece := held.take(stream.received_bytes)) is not None:
        stream.received_bytes += len(piece)
        stream.accept(piece, pool)
    first = held.first_at
    if first is not None and first < stream.received_bytes:
        raise ProtocolViolation("pieces of a stream overlap")
